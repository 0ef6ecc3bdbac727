// The page: opens images, and draws everything when the state changes.

import { byId, choices, element } from "./dom.js";
import { centre, Item } from "./item.js";
import { currentMap, hasView, shareScale } from "./maps.js";
import { describeMap, PANELS, showPanel } from "./panels.js";
import { onChange, readAddress, redraw, setPlaces, state, update, VIEWS } from "./state.js";
import { openSource } from "./source.js";
import { savePng, saveJson } from "./download.js";
import { setUpTour } from "./tour.js";
import { showPredictions } from "./predictions.js";
import { Stage } from "./stage.js";

const source = openSource(askForToken);
const NAMES = { attention: "Attention", rollout: "Rollout", similarity: "Similarity", colours: "Colours", positions: "Positions" };
let start = { models: [], images: [] };
let stages = [];
let maskedFor = ""; // the patches that `item.masked` of the shown images answers to
const thumbnails = [];
const newest = [0, 0]; // the number of the last request for each side

const items = () => stages.map((stage) => stage.item);
const first = () => stages[0].item;

// --- opening ---

async function openItem(blob, name, model) {
  const info = await source.analyse(blob, model);
  const item = new Item(source, info, blob, name);
  await item.openPictures();
  item.onArrival = redraw;
  return item;
}

// Put an item on the left (0) or the right (1) and show it.
function place(item, slot) {
  const fresh = slot === 0 && !stages.length;
  if (slot === 0) fitState(item, fresh);
  stages[slot] = new Stage(item, first, needs);
  byId("stages").replaceChildren(...stages.map((stage) => stage.root));
  document.body.classList.toggle("comparing", stages.length > 1);
  for (const other of items()) other.masked = null;
  maskedFor = "";
  redraw();
  item.prefetch(item.layerLike(first(), state.layer)).catch(showError);
}

// Keep what is chosen where the model has it; otherwise choose something that shows well.
function fitState(item, fresh) {
  const changes = {};
  const tokens = item.tokens;
  if (fresh && given.layer === undefined) changes.layer = Math.floor(item.featureLayers * 0.55);
  else changes.layer = Math.min(state.layer, item.featureLayers - 1);
  if ((fresh && given.query === undefined) || state.query >= tokens) changes.query = item.info.prefix.length + centre(item.info.grid);
  if (state.head !== "mean" && state.head >= item.info.heads) changes.head = "mean";
  if (!hasView(item, state.view)) changes.view = "similarity";
  changes.off = state.off.filter((patch) => patch < item.patches);
  Object.assign(state, changes);
}

// Show an image, or the promise of one, on one side. `number` is that of an offered image. Whatever was asked for last stays:
// a large photo can take longer than the small one that was dropped after it.
async function open(blob, name, slot = 0, model = null, number = null) {
  const request = ++newest[slot];
  const outdated = () => request !== newest[slot];
  hideError();
  document.body.classList.add("busy");
  byId("status").textContent = `Computing ${name} …`;
  try {
    const item = await openItem(await blob, name, model ?? (slot === 0 ? byId("model").value : stages[1]?.item.info.model ?? byId("model").value));
    if (outdated()) return;
    item.number = number;
    place(item, slot);
    setPlaces({ [slot ? "image2" : "image"]: number, [slot ? "model2" : "model"]: start.models.length > 1 || slot ? item.info.model : null });
  } catch (error) {
    if (outdated()) return;
    showError(error, name);
    draw(); // the line for screen readers is that of the shown map again
  } finally {
    if (!outdated()) document.body.classList.remove("busy");
  }
}

function openOffered(number, slot = 0, model = null) {
  return open(source.offered(number), start.images[number], slot, model, number);
}

// --- drawing ---

function needs(token) {
  for (const item of items()) {
    if (state.view === "attention" && item.info.attention) item.needAttention(item.layerLike(first(), state.layer), item.tokenLike(first(), token));
  }
}

function draw() {
  if (!stages.length) return;
  state.layer = nearestLayer(first().info.saved_layers, state.layer);
  const maps = items().map((item) => currentMap(item, first()) || null);
  maps.first = first();
  shareScale(maps);
  stages.forEach((stage, number) => {
    stage.item.shown = maps[number];
    stage.draw(maps[number]);
  });
  showPredictions(byId("predictions"), items());
  if (state.hover === null) {
    drawControls();
    drawPanel();
  } else if (!panelTimer) panelTimer = setTimeout(drawPanel, 60); // while the pointer moves, the image comes first
  predictMasked();
  if (state.hover === null && (maps[0] || state.view === "colours")) byId("status").textContent = maps[0] ? describeMap(maps[0]) : stages[0].caption();
  document.body.dataset.drawn = maps[0] ? String(maps[0].query ?? "all") : ""; // the query whose map is on the screen, for tests
}

let panelTimer = 0;
function drawPanel() {
  clearTimeout(panelTimer);
  panelTimer = 0;
  showPanel(byId("panel"), items());
}

// A saved page of a large model has only some layers.
function nearestLayer(layers, wanted) {
  if (!layers?.length) return wanted;
  return layers.reduce((best, layer) => (Math.abs(layer - wanted) < Math.abs(best - wanted) ? layer : best));
}

function drawControls() {
  const item = first();
  const info = item.info;
  byId("model-line").textContent = `${info.name} · ${info.image_size.join("×")} pixels · ${(info.parameters / 1e6).toFixed(1)} M parameters${info.layers ? ` · ${info.layers} layers × ${info.heads} heads` : ""}`;
  byId("model-line").title = byId("model-line").textContent; // the line is cut off where it is too long
  choices(byId("views"), "tab", VIEWS.filter((view) => items().some((each) => hasView(each, view))).map((view) => [view, NAMES[view]]), state.view, (view) => update({ view }));
  choices(byId("tabs"), "tab", PANELS, state.panel, (panel) => update({ panel }));
  const heads = [["mean", "mean"], ...[...Array(info.heads).keys()].map((head) => [head, String(head)])];
  choices(byId("head-control"), "radio", heads, state.head, (head) => update({ head }));
  const layered = ["attention", "similarity", "colours"].includes(state.view) && info.layers > 1;
  byId("depth-control").hidden = !layered;
  byId("depth").max = String(item.featureLayers - 1);
  byId("depth").value = String(state.layer);
  byId("depth-value").textContent = `${state.layer} of 0–${item.featureLayers - 1}`;
  byId("head-control").hidden = state.view !== "attention" || !info.heads;
  byId("rollout-control").hidden = state.view !== "rollout";
  byId("scale-control").hidden = state.view !== "attention";
  byId("style-control").hidden = !["attention", "rollout"].includes(state.view);
  for (const id of ["fusion", "scale", "style"]) byId(id).value = state[id];
  byId("residual").checked = state.residual;
  byId("pixels").checked = state.pixels;
  byId("caveat").textContent = caveat(item);
}

function caveat(item) {
  if (state.view === "attention" || state.view === "rollout") {
    const included = item.info.saved_layers && item.info.saved_layers.length < item.info.layers ? ` This saved page has layers ${item.info.saved_layers.join(", ")}.` : "";
    return `Attention shows where a token reads from. It is not an explanation of the prediction: patches that matter can have little of it.${included}`;
  }
  if (state.view === "colours") return "Signs and scales of components are arbitrary: colours of two images, or of two layers, cannot be compared.";
  if (state.view === "positions") return "Position embeddings belong to the weights: this map does not depend on the image.";
  return "Features are the tokens after a layer, with the final norm applied.";
}

// Predict with patches off, once the choice rests; an answer that comes late is dropped.
let timer = 0;
function predictMasked() {
  const wanted = state.off.join(".");
  if (wanted === maskedFor || source.saved) return;
  maskedFor = wanted;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    try {
      for (const item of items()) {
        const patches = state.off.map((patch) => item.tokenLike(first(), first().info.prefix.length + patch) - item.info.prefix.length);
        const found = patches.length && item.info.predictions.length ? await item.predictWithout(patches) : null;
        if (maskedFor === wanted) item.masked = found;
      }
      redraw();
    } catch (error) {
      showError(error);
    }
  }, 80);
}

// --- errors and dialogs ---

function showError(error, name = "") {
  const message = error.message ?? String(error);
  byId("error").textContent = name ? `${name}: ${message.replace(/^the image: /, "")}` : message;
  byId("error").hidden = false;
}

function hideError() {
  byId("error").hidden = true;
}

function askForToken(again) {
  const dialog = byId("token-dialog");
  if (again) byId("token-hint").textContent = "This token was not accepted. Enter the server’s VITRAIL_TOKEN.";
  dialog.showModal();
  return new Promise((resolve) => {
    const send = () => {
      dialog.close();
      resolve(byId("token").value);
    };
    byId("token-send").onclick = send;
    byId("token").onkeydown = (event) => event.key === "Enter" && (event.preventDefault(), send());
  });
}

function setUpCompare() {
  const dialog = byId("compare-dialog");
  byId("compare-button").addEventListener("click", () => {
    const options = [["same", "the same image"], ...start.images.map((name, number) => [number, name]), ...(source.saved ? [] : [["file", "choose a file …"]])];
    byId("compare-image").replaceChildren(...options.map(([value, label]) => element("option", { value: String(value) }, [label])));
    byId("compare-model").replaceChildren(...start.models.map((name) => element("option", { value: name }, [name])));
    const other = start.images.findIndex((name) => name !== first().name);
    byId("compare-image").value = start.models.length > 1 || other < 0 ? "same" : String(other);
    byId("compare-model").value = start.models.find((name) => name !== first().info.model) ?? first().info.model;
    dialog.showModal();
  });
  byId("compare-show").addEventListener("click", () => {
    dialog.close();
    const [image, model] = [byId("compare-image").value, byId("compare-model").value];
    if (image === "file") byId("compare-file").click();
    else if (image === "same") open(first().blob, first().name, 1, model, first().number);
    else openOffered(Number(image), 1, model);
  });
  byId("compare-file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) open(file, file.name, 1, byId("compare-model").value);
    event.target.value = "";
  });
  byId("compare-none").addEventListener("click", () => {
    dialog.close();
    newest[1]++; // one that is still computed must not appear
    stages.length = 1;
    place(first(), 0);
    setPlaces({ image2: null, model2: null });
  });
}

// --- input ---

function setUpFiles() {
  const take = (file) => file && open(file, file.name || "pasted image");
  byId("file").addEventListener("change", (event) => {
    take(event.target.files[0]);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])][0]));
  const target = byId("drop-target");
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    target.hidden = source.saved;
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || (target.hidden = true));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    target.hidden = true;
    if (!source.saved) take(event.dataTransfer.files[0]);
  });
}

function setUpControls() {
  byId("depth").addEventListener("input", (event) => update({ layer: Number(event.target.value) }));
  for (const id of ["fusion", "scale", "style"]) byId(id).addEventListener("change", (event) => update({ [id]: event.target.value }));
  for (const id of ["residual", "pixels"]) byId(id).addEventListener("change", (event) => update({ [id]: event.target.checked }));
  byId("model").addEventListener("change", () => open(first().blob, first().name, 0, byId("model").value, first().number));
  byId("png-button").addEventListener("click", () => savePng(stages));
  byId("json-button").addEventListener("click", () => saveJson(stages));
  byId("theme-button").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  window.addEventListener("hashchange", () => location.reload()); // an address that was typed or pasted; ours change without this event
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is for the state
    document.querySelector(".frame")?.focus();
  });
  new ResizeObserver(redraw).observe(byId("stages"));
}

async function showGallery() {
  const buttons = start.images.map((name, number) => {
    const canvas = element("canvas", { width: "96", height: "96", "aria-hidden": "true" });
    thumbnails.push(canvas);
    const button = element("button", { type: "button", class: "thumbnail", title: name, "aria-label": `Show ${name}` }, [canvas]);
    button.addEventListener("click", () => openOffered(number));
    return button;
  });
  const add = element("button", { type: "button", class: "thumbnail add", id: "add-image", "aria-label": "Choose an image" }, ["+"]);
  add.addEventListener("click", () => byId("file").click());
  byId("gallery").replaceChildren(...buttons, ...(source.saved ? [] : [add]));
  if (source.saved) byId("drop-hint").textContent = "A saved page: it works without a server and shows its own images. `vitrail explore` opens others.";
  if (start.credit) byId("drop-hint").append(` ${start.credit}`);
  for (const [number, canvas] of thumbnails.entries()) await drawThumbnail(number, canvas).catch(() => {});
}

async function drawThumbnail(number, canvas) {
  const bitmap = source.saved ? (await openItem(await source.offered(number), start.images[number], start.models[0])).photo : await createImageBitmap(await source.offered(number));
  const side = Math.min(bitmap.width, bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 96, 96);
}

const { found: given, opened } = readAddress();

async function begin() {
  Object.assign(state, given);
  setUpFiles();
  setUpControls();
  setUpCompare();
  setUpTour(first);
  onChange(draw);
  start = await source.start();
  byId("model").replaceChildren(...start.models.map((name) => element("option", { value: name }, [name])));
  if (start.models.includes(opened.model)) byId("model").value = opened.model;
  const chosen = (text) => (Number(text) < start.images.length ? Math.max(0, Number(text) || 0) : 0);
  if (start.images.length) await openOffered(chosen(opened.image ?? 0));
  if (stages.length && (opened.image2 !== undefined || opened.model2 !== undefined)) {
    const model = start.models.includes(opened.model2) ? opened.model2 : start.models[0];
    await openOffered(chosen(opened.image2 ?? opened.image ?? 0), 1, model);
  }
  await showGallery();
}

begin().catch(showError);
