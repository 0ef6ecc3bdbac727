// The image with a map on it: draws, and turns pointer and keys into the query.

import { state, update } from "./state.js";
import { colourOf, css, fraction, inkOn, legendColour, lightAt } from "./colours.js";
import { formatted, hasView, shownQuery, strongest } from "./maps.js";
import { element } from "./dom.js";

const LEAD = "rgba(12, 10, 20, 0.38)";

export class Stage {
  constructor(item, getReference, needs) {
    this.item = item;
    this.needs = needs; // asks for the numbers of a query at once, before the next frame is drawn
    this.getReference = getReference; // the item whose tokens `state.query` counts
    this.canvas = element("canvas", { class: "picture", "aria-hidden": "true" });
    this.frame = element("div", {
      class: "frame", tabindex: "0", role: "application",
      "aria-label": `${item.name}: ${item.info.grid[0]} by ${item.info.grid[1]} patches. Arrow keys choose the query patch, Enter keeps it.`,
    }, [this.canvas, (this.tip = element("div", { class: "tip", hidden: "" }))]);
    this.tokens = element("div", { class: "tokens", role: "group", "aria-label": "Prefix tokens" }, item.info.prefix.map((name, token) => this.tokenButton(name, token)));
    this.title = element("p", { class: "map-title" });
    this.bar = element("canvas", { class: "bar", width: "256", height: "1", "aria-hidden": "true" });
    this.low = element("span");
    this.high = element("span");
    this.legend = element("div", { class: "legend" }, [this.low, this.bar, this.high]);
    this.notes = element("ul", { class: "notes" }, item.info.notes.map((text) => element("li", {}, [text])));
    this.heading = element("p", { class: "stage-name" }, [element("strong", { title: item.name }, [item.name]), element("span", {}, [item.info.model])]);
    this.root = element("figure", { class: "stage" }, [
      this.heading, this.frame, this.tokens,
      element("figcaption", {}, [element("div", { class: "caption-row" }, [this.title, this.legend])]), this.notes,
    ]);
    const [height, width] = item.info.image_size;
    this.root.style.setProperty("--aspect", String(width / height));
    this.listen();
  }

  listen() {
    const frame = this.frame;
    frame.addEventListener("pointermove", (event) => {
      if (!event.buttons) this.painting = undefined; // it was released outside
      if (event.pointerType === "touch" && this.painting === undefined) return; // a finger scrolls; a tap chooses
      const patch = this.patchAt(event);
      if (this.painting !== undefined && patch !== null) this.paint(patch);
      else {
        const token = patch === null ? null : this.tokenOf(patch);
        if (token === state.hover) return;
        if (token !== null) this.needs(token);
        update({ hover: token });
      }
    });
    frame.addEventListener("pointerleave", () => update({ hover: null }));
    frame.addEventListener("pointerdown", (event) => {
      const patch = this.patchAt(event);
      if (patch === null || state.panel !== "off") return;
      this.painting = !state.off.includes(this.referencePatch(patch));
      this.paint(patch);
    });
    for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, () => (this.painting = undefined));
    frame.addEventListener("click", (event) => {
      const patch = this.patchAt(event);
      if (patch !== null && state.panel !== "off") update({ query: this.tokenOf(patch), hover: null });
    });
    frame.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const reference = this.getReference();
    const prefix = reference.info.prefix.length;
    const [rows, columns] = reference.info.grid;
    const patch = shownQuery() - prefix; // of a prefix token below 0
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (steps[event.key]) {
      const [down, right] = patch < 0 ? [0, 0] : steps[event.key]; // from a prefix token to the first patch
      const from = Math.max(0, patch);
      const row = Math.min(rows - 1, Math.max(0, Math.floor(from / columns) + down));
      const column = Math.min(columns - 1, Math.max(0, (from % columns) + right));
      update({ query: prefix + row * columns + column, hover: null });
    } else if (event.key === "Enter" || event.key === " ") {
      if (state.panel === "off" && patch >= 0) update({ off: toggled(state.off, patch) });
      else update({ query: shownQuery(), hover: null });
    } else if (event.key === "[" || event.key === "]") {
      const layer = state.layer + (event.key === "]" ? 1 : -1);
      update({ layer: Math.min(reference.featureLayers - 1, Math.max(0, layer)) });
    } else return;
    event.preventDefault();
  }

  patchAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [rows, columns] = this.item.info.grid;
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null;
  }

  // Tokens and patches are kept as those of the reference.
  tokenOf(patch) {
    return this.getReference().tokenLike(this.item, this.item.info.prefix.length + patch);
  }

  referencePatch(patch) {
    return this.tokenOf(patch) - this.getReference().info.prefix.length;
  }

  paint(patch) {
    const number = this.referencePatch(patch);
    if (state.off.includes(number) !== this.painting) update({ off: toggled(state.off, number) });
  }

  draw(map) {
    const { item, canvas } = this;
    const [height, width] = item.info.image_size;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const size = Math.max(64, Math.round(this.frame.clientWidth * ratio));
    if (canvas.width !== size) {
      canvas.width = size;
      canvas.height = Math.round((size * height) / width);
    }
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = !state.pixels;
    context.drawImage(state.pixels ? item.picture : item.photo, 0, 0, canvas.width, canvas.height);
    if (state.view === "colours") this.drawColours(context);
    else if (map && isLight(map)) this.drawLight(context, map);
    else if (map) this.drawMap(context, map);
    this.drawLead(context);
    this.drawOff(context);
    const query = item.tokenLike(this.getReference(), shownQuery()) - item.info.prefix.length;
    if (query >= 0 && state.view !== "rollout" && state.view !== "colours") this.drawQuery(context, query, map, ratio);
    this.describe(map);
  }

  cell(patch) {
    const [rows, columns] = this.item.info.grid;
    const row = Math.floor(patch / columns);
    const column = patch % columns;
    const [w, h] = [this.canvas.width / columns, this.canvas.height / rows];
    const [x, y] = [Math.round(column * w), Math.round(row * h)];
    return [x, y, Math.round((column + 1) * w) - x, Math.round((row + 1) * h) - y];
  }

  // Colours on a grey photo: every hue is that of the map, so it can be compared with the colour bar.
  drawMap(context, map) {
    this.drawGrey(context);
    for (let patch = 0; patch < map.patches.length; patch++) {
      context.fillStyle = css(colourOf(fraction(map.patches[patch], map.scale), map.signed), 0.74);
      context.fillRect(...this.cell(patch));
    }
  }

  drawLight(context, map) {
    for (let patch = 0; patch < map.patches.length; patch++) {
      context.fillStyle = `rgba(0, 0, 0, ${1 - lightAt(fraction(map.patches[patch], map.scale))})`;
      context.fillRect(...this.cell(patch));
    }
  }

  drawGrey(context) {
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "#808080";
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.globalCompositeOperation = "source-over";
  }

  drawColours(context) {
    const colours = this.item.colours(this.item.layerLike(this.getReference(), state.layer));
    if (!colours) return;
    this.drawGrey(context);
    for (let patch = 0; patch < this.item.patches; patch++) {
      context.fillStyle = css(colours.subarray(3 * patch, 3 * patch + 3), 0.86);
      context.fillRect(...this.cell(patch));
    }
  }

  // Thin dark lines between the patches, as the lead between the panes of a window.
  drawLead(context) {
    const [rows, columns] = this.item.info.grid;
    if (Math.max(rows, columns) > 40) return;
    context.fillStyle = LEAD;
    const width = Math.max(1, Math.round(this.canvas.width / columns / 48));
    for (let c = 1; c < columns; c++) context.fillRect(Math.round((c * this.canvas.width) / columns) - width / 2, 0, width, this.canvas.height);
    for (let r = 1; r < rows; r++) context.fillRect(0, Math.round((r * this.canvas.height) / rows) - width / 2, this.canvas.width, width);
  }

  drawOff(context) {
    for (const patch of this.item.offLike(this.getReference(), state.off)) {
      const [x, y, w, h] = this.cell(patch);
      context.fillStyle = "rgb(128, 128, 128)";
      context.fillRect(x, y, w, h);
      context.strokeStyle = "rgba(255, 255, 255, 0.55)";
      context.lineWidth = Math.max(1, w / 24);
      context.beginPath();
      context.moveTo(x + 0.3 * w, y + 0.3 * h);
      context.lineTo(x + 0.7 * w, y + 0.7 * h);
      context.moveTo(x + 0.7 * w, y + 0.3 * h);
      context.lineTo(x + 0.3 * w, y + 0.7 * h);
      context.stroke();
    }
  }

  drawQuery(context, patch, map, ratio) {
    const [x, y, w, h] = this.cell(patch);
    context.lineJoin = "round";
    for (const [colour, width] of [["rgba(10, 8, 18, 0.9)", 5], ["#ffffff", 2.5]]) {
      context.strokeStyle = colour;
      context.lineWidth = width * ratio;
      context.setLineDash(state.hover === null ? [] : [4 * ratio, 3 * ratio]);
      context.strokeRect(x, y, w, h);
    }
    context.setLineDash([]);
  }

  describe(map) {
    const info = this.item.info;
    const [title, detail] = this.words();
    this.title.replaceChildren(element("strong", {}, [title]), element("span", {}, [detail]));
    this.legend.hidden = !map;
    if (map) this.drawLegend(map);
    this.drawTokens(map);
    this.tip.hidden = true;
    if (map && state.hover !== null && this.frame.matches(":hover")) this.showTip(map);
    this.frame.classList.toggle("switching", state.panel === "off");
    this.notes.hidden = !info.notes.length;
  }

  // Title and detail of what is shown, or why nothing is.
  words() {
    const map = this.item.shown;
    if (map) return [map.title, map.detail];
    if (this.isComing()) return ["Loading …", `${this.item.info.model} computes it`];
    return [state.view === "colours" ? "Features as colours" : "Nothing to show here", this.reason()];
  }

  // Whether the view exists for this query, and its numbers are on their way.
  isComing() {
    const { item } = this;
    if (!hasView(item, state.view) || item.failure()) return false;
    if (state.view === "colours") return !item.results.has("colours");
    return state.view !== "positions" || item.tokenLike(this.getReference(), shownQuery()) >= item.info.prefix.length;
  }

  reason() {
    const info = this.item.info;
    const layer = this.item.layerLike(this.getReference(), state.layer);
    if (state.view === "colours") return `three principal components after ${info.layers ? `layer ${layer}` : "the last stage"}, as red, green, blue`;
    if (["attention", "rollout"].includes(state.view) && !info.attention) return `${info.name} is a ResNet and has no attention.`;
    if (state.view === "positions" && !info.positions) return `${info.name} has no position vectors.`;
    return this.item.failure() ?? "Choose a patch: this view compares the positions of patches.";
  }

  drawLegend(map) {
    const context = this.bar.getContext("2d");
    for (let k = 0; k < 256; k++) {
      context.fillStyle = legendColour(k / 255, map.signed, state.style);
      context.fillRect(k, 0, 1, 1);
    }
    this.low.textContent = formatted(map.scale.low, map.unit);
    this.high.textContent = formatted(map.scale.high, map.unit);
  }

  // Class, distillation and register tokens have no place in the image: they are buttons with their own value.
  tokenButton(name, token) {
    const button = element("button", { type: "button", class: "token", title: `Use the ${name} token as query` });
    button.addEventListener("click", () => update({ query: this.getReference().tokenLike(this.item, token), hover: null }));
    return button;
  }

  drawTokens(map) {
    const query = this.item.tokenLike(this.getReference(), shownQuery());
    this.tokens.hidden = !this.item.info.prefix.length;
    for (const [token, button] of [...this.tokens.children].entries()) {
      const value = map?.prefix ? map.prefix[token] : null;
      const colour = value === null ? null : colourOf(fraction(value, map.scale), map.signed);
      button.textContent = value === null ? this.item.info.prefix[token] : `${this.item.info.prefix[token]} ${formatted(value, map.unit)}`;
      button.setAttribute("aria-pressed", String(query === token));
      button.style.background = colour ? css(colour) : "";
      button.style.color = colour ? inkOn(colour) : "";
    }
  }

  showTip(map) {
    const patch = this.item.tokenLike(this.getReference(), state.hover) - this.item.info.prefix.length;
    if (patch < 0) return;
    const best = strongest(map);
    const count = this.item.info.prefix.length;
    const text = map.query === null
      ? `${this.item.tokenName(patch + count)}: ${formatted(map.patches[patch], map.unit)}`
      : `strongest: ${this.item.tokenName(best + count)} with ${formatted(map.patches[best], map.unit)}` +
        (map.uniform ? ` (${(map.patches[best] / map.uniform).toFixed(1)} × uniform)` : "");
    this.tip.textContent = text;
    this.tip.hidden = false;
  }
}

function isLight(map) {
  return state.style === "light" && !map.signed;
}

function toggled(list, one) {
  return list.includes(one) ? list.filter((other) => other !== one) : [...list, one].sort((a, b) => a - b);
}
