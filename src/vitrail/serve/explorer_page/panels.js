// The panels at the side: all heads at once, predictions layer by layer, distances, and patches switched off.

import { drawn, element } from "./dom.js";
import { state, update } from "./state.js";
import { PIXELS } from "./colours.js";
import { commonScale, formatted, shownQuery, strongest } from "./maps.js";
import { barFrom, rangeOf, scoreText } from "./predictions.js";

export const PANELS = [
  ["heads", "Heads", "Attention of every layer and head at once"],
  ["layers", "Layers", "Predictions read out after each layer"],
  ["distance", "Distance", "Mean attention distance by head"],
  ["off", "Patches off", "Switch patches off and predict again"],
];

const DRAW = { heads, layers, distance, off };

// Whether a panel has something to show of a model.
export function hasPanel(item, panel) {
  return panel === "off" ? item.info.predictions.length > 0 : Boolean(item.info.attention);
}

// `reference` is the item whose layers and tokens `state` counts.
export function showPanel(root, items, reference) {
  const key = `${state.panel} ${items.map((item) => item.info.id + item.info.model).join(" ")}`;
  if (root.dataset.key !== key) {
    root.dataset.key = key;
    root.replaceChildren();
  }
  root.setAttribute("aria-labelledby", `tabs-${state.panel}`);
  const shown = items.filter((item) => hasPanel(item, state.panel));
  if (shown.length) DRAW[state.panel](root, shown, reference, items.length > 1);
  else root.replaceChildren(element("p", { class: "hint" }, [state.panel === "off" ? "Without a trained head there is no prediction to compare." : `${reference.info.name} is a ResNet: it has no attention.`]));
}

function fullName(item) {
  return `${item.name} · ${item.info.model}`;
}

// --- all heads ---

function heads(root, items, reference, named) {
  if (!root.firstChild) root.append(element("p", { class: "hint" }), ...items.map((item) => overview(item, reference, named)));
  const most = state.scale === "all" ? commonScale(items, reference).high : null;
  const scale = most === null ? "each from 0 to its own largest weight" : `all from 0 to ${formatted(most, "percent")}`;
  const some = items.some((item) => item.info.attention.send === "query of a layer") ? " Layers of this large model appear when they are opened." : "";
  root.firstChild.textContent = `Attention of the query in every layer and head, ${scale}. Click one to open it.${some}`;
  items.forEach((item, number) => drawOverview(root.children[number + 1], item, reference, most));
}

function overview(item, reference, named) {
  const canvas = element("canvas", {
    class: "overview", tabindex: "0", role: "application",
    "aria-label": `${named ? `${fullName(item)}: attention` : "Attention"} of ${item.info.layers} layers, left to right, and ${item.info.heads} heads, top to bottom. Arrow keys open another.`,
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(canvas, event, item);
    if (cell) update({ layer: reference.layerLike(item, cell.layer), head: cell.head, view: "attention" });
  });
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(canvas, event, item);
    canvas.title = cell ? `layer ${cell.layer}, ${cell.head === "mean" ? "mean of all heads" : `head ${cell.head}`}` : "";
  });
  canvas.addEventListener("keydown", (event) => {
    const row = state.head === "mean" ? 0 : state.head + 1;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    const next = Math.min(item.info.heads, Math.max(0, row + step[1]));
    update({ layer: Math.min(reference.featureLayers - 1, Math.max(0, state.layer + step[0])), head: next ? next - 1 : "mean", view: "attention" });
    event.preventDefault();
  });
  const { width, height } = layout(item);
  const plot = element("div", { class: "overview-plot" }, [canvas, element("div", { class: "chosen-cell" }), ...axes(item)]);
  plot.style.aspectRatio = `${width} / ${height}`;
  plot.style.width = `min(100% - 2.8em, ${Math.round((420 * width) / height)}px)`;
  return element("div", { class: "overview-box" }, [...(named ? [element("p", { class: "hint name" }, [fullName(item)])] : []), plot]);
}

// Numbers of heads at the left and of layers below, as many as there is space for.
function axes(item) {
  const { rows, columns, gap, width, height } = layout(item);
  const scale = Math.min(350 / width, 420 / height);
  const every = (size, least) => Math.ceil(least / (size * scale));
  const [headStep, layerStep] = [every(rows + gap, 13), every(columns + gap, 17)];
  const text = (label, kind, side, share) => {
    const made = element("span", { class: `axis ${kind}`, "aria-hidden": "true" }, [label]);
    made.style[side] = `${100 * share}%`;
    return made;
  };
  const left = (row) => ((row + 1) * (rows + gap) + rows / 2) / height;
  return [
    text("mean", "head-number", "top", left(-1)),
    ...upTo(item.info.heads).filter((head) => head % headStep === 0 && left(head) - left(-1) > 12 / (height * scale)).map((head) => text(String(head), "head-number", "top", left(head))),
    ...upTo(item.info.layers).filter((layer) => layer % layerStep === 0).map((layer) => text(String(layer), "layer-below", "left", (layer * (columns + gap) + columns / 2) / width)),
    element("span", { class: "axis layer-below word", "aria-hidden": "true" }, ["layer"]),
  ];
}

function upTo(number) {
  return [...Array(number).keys()];
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

function drawOverview(box, item, reference, most) {
  const canvas = box.querySelector("canvas");
  const { rows, columns, gap, width, height } = layout(item);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const query = item.tokenLike(reference, shownQuery());
  const prefix = item.info.prefix.length;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let layer = 0; layer < item.info.layers; layer++) {
    const mean = new Float32Array(item.tokens);
    for (let head = 0; head < item.info.heads; head++) {
      const row = item.attention(layer, head, query);
      if (!row) break;
      for (let k = 0; k < row.length; k++) mean[k] += row[k] / item.info.heads;
      fill(pixels, width, row, prefix, most, layer * (columns + gap), (head + 1) * (rows + gap), columns);
      if (head === item.info.heads - 1) fill(pixels, width, mean, prefix, most, layer * (columns + gap), 0, columns);
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  mark(box.querySelector(".chosen-cell"), item, reference);
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
function mark(frame, item, reference) {
  const { rows, columns, gap, width, height } = layout(item);
  const layer = item.layerLike(reference, state.layer);
  const line = state.head === "mean" ? 0 : Math.min(state.head, item.info.heads - 1) + 1;
  frame.style.left = `${(100 * layer * (columns + gap)) / width}%`;
  frame.style.top = `${(100 * line * (rows + gap)) / height}%`;
  frame.style.width = `${(100 * columns) / width}%`;
  frame.style.height = `${(100 * rows) / height}%`;
}

// --- predictions after each layer ---

function layers(root, items, reference, named) {
  if (!root.firstChild) root.append(...items.flatMap((item, number) => readOut(item, number, reference, named)));
  for (const row of root.querySelectorAll("button")) {
    const item = items[Number(row.dataset.item)];
    row.setAttribute("aria-pressed", String(Number(row.dataset.layer) === item.layerLike(reference, state.layer)));
  }
}

function readOut(item, number, reference, named) {
  const { read_out: read, score } = item.info;
  const title = named ? [element("p", { class: "hint name" }, [fullName(item)])] : [];
  if (!read) return [...title, element("p", { class: "hint" }, ["Without a trained head nothing can be read out."])];
  const bars = `Bars: ${read.labels[0]}${score === "value" ? "" : ", the final prediction. Words: the best label there"}.`;
  const range = score === "value" ? rangeOf(read.scores.map((row) => row[0])) : [0, 1];
  const rows = read.top.map((top, layer) => {
    const words = score === "value" ? scoreText(read.scores[layer][0], score) : `${top.label} ${(100 * top.score).toFixed(0)} %`;
    const row = element("button", { type: "button", class: top.label === read.labels[0] ? "agrees" : "", title: words, "data-item": String(number), "data-layer": String(layer) }, [
      element("span", { class: "layer-number" }, [String(layer)]),
      element("span", { class: "track" }, [barFrom("fill", read.scores[layer][0], range)]),
      element("span", { class: "label" }, [words]),
    ]);
    row.addEventListener("click", () => update({ layer: reference.layerLike(item, layer) }));
    return element("li", {}, [row]);
  });
  return [...title, element("p", { class: "hint" }, [`Final norm, pooling and head applied after each layer. ${bars}`]), element("ol", { class: "read-out" }, rows)];
}

// --- mean attention distance ---

function distance(root, items, reference, named) {
  const found = items.map((item) => item.distance());
  if (!found.some(Boolean)) {
    root.replaceChildren(element("p", { class: "hint" }, [items[0].failure() ?? "Computing …"]));
    return;
  }
  const most = Math.max(1, ...found.filter(Boolean).map((each) => Math.max(each.uniform, ...each.distance.flat()))) * 1.06;
  const [width, height, left, bottom] = [400, 252, 40, 36];
  const x = (item, layer) => left + 8 + ((width - left - 16) * layer) / Math.max(1, item.info.layers - 1);
  const y = (pixels) => (height - bottom) * (1 - pixels / most) + 4;
  const marks = [];
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((size) => most / size <= 6) ?? 500;
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, k) => step * k);
  for (const tick of ticks) marks.push(drawn("line", { x1: left, x2: width, y1: y(tick), y2: y(tick), class: "grid" }), drawn("text", { x: left - 6, y: y(tick) + 4, class: "tick end" }, [String(tick)]));
  found.forEach((each, number) => each && marks.push(...dots(items[number], reference, each, number, x, y, width, left)));
  const depth = items[0].info.layers;
  for (let layer = 0; layer < depth; layer += Math.ceil(depth / 12)) marks.push(drawn("text", { x: x(items[0], layer), y: height - bottom + 17, class: "tick middle" }, [String(layer)]));
  marks.push(drawn("text", { x: (left + width) / 2, y: height - 4, class: "tick middle" }, ["layer"]));
  root.replaceChildren(
    element("p", { class: "hint" }, ["How far each head attends, in pixels of the input, for this image (the paper’s Fig. 7, right). Dashed: uniform attention."]),
    drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "Mean attention distance in pixels by layer and head" }, marks),
    ...(named ? items.map((item, number) => swatch(item, number)) : []),
  );
}

function swatch(item, number) {
  return element("p", { class: "hint name" }, [element("b", { class: `series-${number}` }, ["● "]), fullName(item)]);
}

function dots(item, reference, each, number, x, y, width, left) {
  const marks = [drawn("line", { x1: left, x2: width, y1: y(each.uniform), y2: y(each.uniform), class: `uniform series-${number}` })];
  each.distance.forEach((row, layer) =>
    row.forEach((pixels, head) => {
      const chosen = layer === item.layerLike(reference, state.layer) && (state.head === "mean" || state.head === head);
      const dot = drawn("circle", { cx: x(item, layer), cy: y(pixels), r: chosen ? 6 : 4.2, class: `dot series-${number}${chosen ? " chosen" : ""}` });
      dot.append(drawn("title", {}, [`layer ${layer}, head ${head}: ${pixels.toFixed(1)} pixels`]));
      dot.addEventListener("click", () => update({ layer: reference.layerLike(item, layer), head, view: "attention" }));
      marks.push(dot);
    }),
  );
  return marks;
}

// --- patches off ---

const OFF =
  "Click patches of the image, or drag over them. They are replaced by the mean colour of the preprocessing (0 after normalisation), and the model predicts again. Maps stay those of the whole image.";
const SAVED_OFF = "A saved page marks patches, but has no model that predicts without them. Run `vitrail explore` for that.";

function off(root, items, reference) {
  if (!root.firstChild) {
    const button = (text, choose) => {
      const made = element("button", { type: "button" }, [text]);
      made.addEventListener("click", () => update({ off: choose() }));
      return made;
    };
    root.append(
      element("p", { class: "hint" }, [reference.source.saved ? SAVED_OFF : OFF]),
      element("div", { class: "button-row" }, [
        button("Highest quarter of the map", () => ranked(reference).slice(0, Math.ceil(reference.patches / 4)).sort((a, b) => a - b)),
        button("Lowest quarter", () => ranked(reference).slice(-Math.ceil(reference.patches / 4)).sort((a, b) => a - b)),
        button("Invert", () => upTo(reference.patches).filter((patch) => !state.off.includes(patch))),
        button("All on", () => []),
      ]),
      element("p", { class: "hint off-state" }),
    );
  }
  root.querySelector(".off-state").textContent = `${state.off.length} of ${reference.patches} patches are off.`;
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
