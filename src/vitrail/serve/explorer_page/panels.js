// The panels at the side: all heads at once, predictions layer by layer, distances, and patches switched off.

import { drawn, element } from "./dom.js";
import { state, update } from "./state.js";
import { LINES, PIXELS } from "./colours.js";
import { formatted, scaleOfAll, shownQuery, strongest } from "./maps.js";

export const PANELS = [
  ["heads", "Heads", "Attention of every layer and head at once"],
  ["layers", "Layers", "Predictions read out after each layer"],
  ["distance", "Distance", "Mean attention distance by head"],
  ["off", "Patches off", "Switch patches off and predict again"],
];

export function showPanel(root, items) {
  const draw = { heads: heads, layers: layers, distance: distance, off: off }[state.panel] ?? heads;
  const key = `${state.panel} ${items.map((item) => item.info.id).join(" ")}`;
  if (root.dataset.key !== key) {
    root.dataset.key = key;
    root.replaceChildren();
  }
  draw(root, items);
}

function missing(root, text) {
  root.replaceChildren(element("p", { class: "hint" }, [text]));
}

// --- all heads ---

function heads(root, items) {
  const item = items[0];
  if (!item.info.attention) return missing(root, `${item.info.name} is a ResNet: it has no attention.`);
  if (!root.firstChild) root.append(...items.map((each) => overview(each, items)));
  for (const [number, each] of items.entries()) drawOverview(root.children[number], each, items[0]);
  return undefined;
}

function overview(item, items) {
  const canvas = element("canvas", {
    class: "overview", tabindex: "0", role: "application",
    "aria-label": `Attention of ${item.info.layers} layers, left to right, and ${item.info.heads} heads, top to bottom. Arrow keys choose one, Enter opens it.`,
  });
  const open = (event) => {
    const cell = cellAt(canvas, event, item);
    if (cell) update({ layer: items[0].layerLike(item, cell.layer), head: cell.head, view: "attention" });
  };
  canvas.addEventListener("click", open);
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(canvas, event, item);
    canvas.title = cell ? `layer ${cell.layer}, ${cell.head === "mean" ? "mean of all heads" : `head ${cell.head}`}` : "";
  });
  canvas.addEventListener("keydown", (event) => {
    const row = state.head === "mean" ? 0 : state.head + 1;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    const next = Math.min(item.info.heads, Math.max(0, row + step[1]));
    update({ layer: Math.min(items[0].featureLayers - 1, Math.max(0, state.layer + step[0])), head: next ? next - 1 : "mean", view: "attention" });
    event.preventDefault();
  });
  return element("div", { class: "overview-box" }, [
    element("p", { class: "hint" }, [items.length > 1 ? `${item.name} · ${item.info.model}` : "One square per layer (left to right) and head (top to bottom, the mean first). Click one to open it."]),
    canvas,
    element("p", { class: "hint axis" }, [`layer 0 to ${item.info.layers - 1} →`]),
  ]);
}

function layout(item) {
  const [rows, columns] = item.info.grid;
  const gap = Math.max(1, Math.round(columns / 8));
  return { rows, columns, gap, width: item.info.layers * (columns + gap) - gap, height: (item.info.heads + 1) * (rows + gap) - gap };
}

function cellAt(canvas, event, item) {
  const box = canvas.getBoundingClientRect();
  const { rows, columns, gap, width, height } = layout(item);
  const layer = Math.floor((((event.clientX - box.left) / box.width) * width) / (columns + gap));
  const row = Math.floor((((event.clientY - box.top) / box.height) * height) / (rows + gap));
  if (layer < 0 || layer >= item.info.layers || row < 0 || row > item.info.heads) return null;
  return { layer, head: row ? row - 1 : "mean" };
}

function drawOverview(box, item, first) {
  const canvas = box.querySelector("canvas");
  if (!item.info.attention) return;
  const { rows, columns, gap, width, height } = layout(item);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const query = item.tokenLike(first, shownQuery());
  const prefix = item.info.prefix.length;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const common = state.scale === "all" ? scaleOfAll(item, first).high : null;
  for (let layer = 0; layer < item.info.layers; layer++) {
    const mean = new Float32Array(item.tokens);
    for (let head = 0; head < item.info.heads; head++) {
      const row = item.attention(layer, head, query);
      if (!row) break;
      for (let k = 0; k < row.length; k++) mean[k] += row[k] / item.info.heads;
      fill(pixels, width, row, prefix, common, layer * (columns + gap), (head + 1) * (rows + gap), columns);
      if (head === item.info.heads - 1) fill(pixels, width, mean, prefix, common, layer * (columns + gap), 0, columns);
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.aspectRatio = `${width} / ${height}`;
  mark(canvas, box, item, first);
}

function fill(pixels, width, row, prefix, common, left, top, columns) {
  let high = common ?? 0;
  if (common === null) for (let k = prefix; k < row.length; k++) if (row[k] > high) high = row[k];
  const factor = high > 0 ? 255 / high : 0;
  for (let k = 0; k < row.length - prefix; k++) {
    const place = Math.min(255, Math.round(row[prefix + k] * factor));
    pixels[(top + Math.floor(k / columns)) * width + left + (k % columns)] = PIXELS[place];
  }
}

// The chosen square is framed by an element, because a canvas of one pixel per patch is too coarse for a thin line.
function mark(canvas, box, item, first) {
  let frame = box.querySelector(".chosen-cell");
  if (!frame) {
    frame = element("div", { class: "chosen-cell" });
    box.append(frame);
  }
  const { rows, columns, gap, width, height } = layout(item);
  const layer = item.layerLike(first, state.layer);
  const line = state.head === "mean" ? 0 : Math.min(state.head, item.info.heads - 1) + 1;
  const [x, y] = [canvas.clientWidth / width, canvas.clientHeight / height];
  frame.style.left = `${canvas.offsetLeft + layer * (columns + gap) * x - 2}px`;
  frame.style.top = `${canvas.offsetTop + line * (rows + gap) * y - 2}px`;
  frame.style.width = `${columns * x + 4}px`;
  frame.style.height = `${rows * y + 4}px`;
}

// --- predictions after each layer ---

function layers(root, items) {
  if (root.firstChild && root.dataset.layer === String(state.layer)) return;
  root.dataset.layer = String(state.layer);
  root.replaceChildren();
  for (const item of items) {
    const read = item.info.read_out;
    if (!read || !item.info.layers) {
      root.append(element("p", { class: "hint" }, [read ? "A ResNet has no layers of tokens to read out." : "Without a trained head nothing can be read out."]));
      continue;
    }
    const chosen = item.layerLike(items[0], state.layer);
    const name = items.length > 1 ? `${item.name} · ${item.info.model}: ` : "";
    root.append(
      element("p", { class: "hint" }, [`${name}Final norm, pooling and head applied after each layer. Bars: the final prediction, ${read.labels[0]}. Words: the best label there.`]),
      element("ol", { class: "read-out" }, read.top.map((top, layer) => readOutRow(item, read, top, layer, layer === chosen, items[0]))),
    );
  }
}

function readOutRow(item, read, top, layer, chosen, first) {
  const value = item.info.score === "value";
  const most = value ? Math.max(...read.scores.map((row) => Math.abs(row[0])), 1e-9) : 1;
  const bar = element("i", { class: "fill" });
  bar.style.width = `${(100 * Math.abs(read.scores[layer][0])) / most}%`;
  const words = value ? read.scores[layer][0].toPrecision(4) : `${top.label} ${(100 * top.score).toFixed(0)} %`;
  const row = element("button", { type: "button", class: top.label === read.labels[0] ? "agrees" : "", "aria-pressed": String(chosen) }, [
    element("span", { class: "layer-number" }, [String(layer)]), element("span", { class: "track" }, [bar]), element("span", { class: "label" }, [words]),
  ]);
  row.addEventListener("click", () => update({ layer: first.layerLike(item, layer) }));
  return element("li", {}, [row]);
}

// --- mean attention distance ---

function distance(root, items) {
  const found = items.map((item) => item.info.attention && item.distance());
  if (!found.some(Boolean)) return missing(root, items[0].info.attention ? (items[0].failure() ?? "Computing …") : `${items[0].info.name} has no attention.`);
  const most = Math.max(...found.filter(Boolean).map((each) => Math.max(each.uniform, ...each.distance.flat()))) * 1.06;
  const [width, height, left, bottom] = [400, 252, 40, 36];
  const x = (item, layer) => left + 8 + ((width - left - 16) * layer) / Math.max(1, item.info.layers - 1);
  const y = (pixels) => (height - bottom) * (1 - pixels / most) + 4;
  const marks = [];
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((size) => most / size <= 6) ?? 500;
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, k) => step * k);
  for (const tick of ticks) marks.push(drawn("line", { x1: left, x2: width, y1: y(tick), y2: y(tick), class: "grid" }), drawn("text", { x: left - 6, y: y(tick) + 4, class: "tick end" }, [String(tick)]));
  found.forEach((each, number) => each && marks.push(...dots(items[number], items[0], each, number, x, y, width, left)));
  const depth = items[0].info.layers;
  for (let layer = 0; layer < depth; layer += Math.ceil(depth / 12)) marks.push(drawn("text", { x: x(items[0], layer), y: height - bottom + 17, class: "tick middle" }, [String(layer)]));
  marks.push(drawn("text", { x: (left + width) / 2, y: height - 4, class: "tick middle" }, ["layer"]));
  root.replaceChildren(
    element("p", { class: "hint" }, ["How far each head attends, in pixels of the input, for this image (the paper’s Fig. 7, right). Dashed: uniform attention."]),
    drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "Mean attention distance in pixels by layer and head" }, marks),
    ...(items.length > 1 ? [element("p", { class: "hint" }, items.map((item, number) => swatch(item, number)))] : []),
  );
  return undefined;
}

function swatch(item, number) {
  const dot = element("b", {}, ["● "]);
  dot.style.color = LINES[number];
  return element("span", { class: "swatch" }, [dot, `${item.name} · ${item.info.model}  `]);
}

function dots(item, first, each, number, x, y, width, left) {
  const marks = [drawn("line", { x1: left, x2: width, y1: y(each.uniform), y2: y(each.uniform), class: "uniform", stroke: LINES[number] })];
  each.distance.forEach((row, layer) =>
    row.forEach((pixels, head) => {
      const chosen = layer === item.layerLike(first, state.layer) && (state.head === "mean" || state.head === head);
      const dot = drawn("circle", { cx: x(item, layer), cy: y(pixels), r: chosen ? 6 : 4.2, fill: LINES[number], class: chosen ? "dot chosen" : "dot" });
      dot.append(drawn("title", {}, [`layer ${layer}, head ${head}: ${pixels.toFixed(1)} pixels`]));
      dot.addEventListener("click", () => update({ layer: first.layerLike(item, layer), head, view: "attention" }));
      marks.push(dot);
    }),
  );
  return marks;
}

// --- patches off ---

function off(root, items) {
  const first = items[0];
  if (!root.firstChild) {
    const button = (text, choose) => {
      const made = element("button", { type: "button" }, [text]);
      made.addEventListener("click", () => update({ off: choose() }));
      return made;
    };
    const all = [...Array(first.patches).keys()];
    root.append(
      element("p", { class: "hint" }, ["Click patches of the image, or drag over them. They are replaced by the mean colour of the preprocessing (0 after normalisation), and the model predicts again. Maps stay those of the whole image."]),
      element("div", { class: "button-row" }, [
        button("Highest quarter of the map", () => ranked(first).slice(0, Math.ceil(first.patches / 4)).sort((a, b) => a - b)),
        button("Lowest quarter", () => ranked(first).slice(-Math.ceil(first.patches / 4)).sort((a, b) => a - b)),
        button("Invert", () => all.filter((patch) => !state.off.includes(patch))),
        button("All on", () => []),
      ]),
      element("p", { class: "hint off-state" }),
    );
  }
  const saved = first.source.saved ? " A saved page cannot predict again; run `vitrail explore`." : "";
  root.querySelector(".off-state").textContent = `${state.off.length} of ${first.patches} patches are off.${saved}`;
}

// Patches by the map that is shown, highest first; without one, by their number.
function ranked(item) {
  const values = item.shown?.patches ?? new Float32Array(item.patches);
  return [...values.keys()].sort((a, b) => values[b] - values[a]);
}

export function describeMap(map) {
  const best = strongest(map);
  return `${map.title}, ${map.detail}. Strongest: ${map.item.tokenName(best + map.item.info.prefix.length)}, ${formatted(map.patches[best], map.unit)}.`;
}
