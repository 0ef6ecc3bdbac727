// What is chosen, in one object. It is mirrored in the address after #, so that a link shows the same view.

export const VIEWS = ["attention", "rollout", "similarity", "colours", "positions"];

export const state = {
  view: "attention",
  layer: 0, // of the first image's model; another model shows the layer at the same relative depth
  head: "mean", // or a number
  query: 0, // token that looks, of the first image's model: prefix tokens first, then patches by row
  hover: null, // token under the pointer; it comes before `query` and is never in the address
  scale: "own", // own: each map from 0 to its maximum. all: one scale for all layers and heads of a query
  fusion: "mean",
  residual: true,
  style: "colour", // or "light"
  pixels: false, // show the model's input instead of the photo
  off: [], // patches that are replaced by the mean colour
  panel: "heads",
};

// What the address may say where not every text is possible.
const POSSIBLE = { view: VIEWS, scale: ["own", "all"], fusion: ["mean", "max", "min"], style: ["colour", "light"], panel: ["heads", "layers", "distance", "off"] };
const DEFAULTS = { ...state };
const KEYS = Object.keys(state).filter((key) => key !== "hover");
const observers = [];
let frame = 0;
let places = {}; // image, model, image2, model2: what can be opened again from an address

export function onChange(observer) {
  observers.push(observer);
}

export function update(changes) {
  Object.assign(state, changes);
  redraw();
}

// Draw at most once per frame, however many events arrive.
export function redraw() {
  if (!frame) {
    frame = requestAnimationFrame(() => {
      frame = 0;
      for (const observer of observers) observer();
      writeAddress();
    });
  }
}

export function setPlaces(changes) {
  places = { ...places, ...changes };
}

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = {};
  for (const key of KEYS) {
    if (!given.has(key)) continue;
    const text = given.get(key);
    if (key === "off") found.off = text.split(".").filter(Boolean).map(Number).filter((patch) => Number.isInteger(patch) && patch >= 0);
    else if (key === "head") found.head = text === "mean" ? "mean" : Math.max(0, Math.floor(Number(text)) || 0);
    else if (typeof DEFAULTS[key] === "number") found[key] = Math.max(0, Math.floor(Number(text)) || 0);
    else if (typeof DEFAULTS[key] === "boolean") found[key] = text === "true";
    else if (POSSIBLE[key].includes(text)) found[key] = text;
  }
  const opened = {};
  for (const key of ["image", "model", "image2", "model2"]) if (given.has(key)) opened[key] = given.get(key);
  return { found, opened };
}

function writeAddress() {
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries(places)) if (value != null) parts.set(key, value);
  for (const key of KEYS) {
    const value = key === "off" ? state.off.join(".") : String(state[key]);
    const normal = key === "off" ? "" : String(DEFAULTS[key]);
    if (value !== normal || key === "layer" || key === "query") parts.set(key, value);
  }
  const address = `#${parts}`;
  // The address of a saved file may not be changed by a script in every browser.
  if (address !== location.hash) {
    try {
      history.replaceState(null, "", address);
    } catch {
      /* the view works without it */
    }
  }
}
