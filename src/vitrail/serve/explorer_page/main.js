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
const NAMES = {
  attention: ["Attention", "Where the query reads from, in one layer"],
  rollout: ["Rollout", "Attention multiplied through all layers, from the output to the patches"],
  similarity: ["Similarity", "Which patches have features like those of the query"],
  colours: ["Colours", "Three principal components of the features, as red, green and blue"],
  positions: ["Positions", "Which position embeddings are like that of the query"],
};
let start = { models: [], images: [] };
let starting = null; // the promise of it
let stages = [];
const newest = [0, 0]; // the number of the last request for each side
const uploads = []; // {blob, name, button} of the user's own images, so that they can be chosen again

const items = () => stages.map((stage) => stage.item);
// The item whose layers, heads and patches the state counts: the first one that has attention, as a ResNet has no layers.
const reference = () => items().find((item) => item.info.attention) ?? stages[0].item;

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
  const before = stages.length ? reference() : null;
  stages[slot]?.item.close();
  stages[slot] = new Stage(item, reference, needs);
  arrange(before);
  item.prefetch(item.layerLike(reference(), state.layer)).catch(showError);
}

// Show the stages; `before` is the item that the state counted layers and patches of.
function arrange(before) {
  if (before) followReference(before);
  fitState(before === null);
  byId("model").value = stages[0].item.info.model;
  byId("stages").replaceChildren(...stages.map((stage) => stage.root));
  if (stages.length > 1) stages[1].heading.append(closeButton());
  document.body.classList.toggle("comparing", stages.length > 1);
  document.body.classList.remove("empty");
  for (const button of document.querySelectorAll(".actions button")) button.disabled = false;
  for (const other of items()) other.masked = null;
  maskedFor = "";
  redraw();
}

// Choose in the present reference what was chosen in the one before: the same relative depth and the same places.
function followReference(before) {
  const now = reference();
  if (now === before) return;
  state.layer = now.layerLike(before, state.layer);
  state.query = now.tokenLike(before, state.query);
  state.off = now.offLike(before, state.off);
  state.hover = null;
}

// Keep what is chosen where the model has it; otherwise choose something that shows well.
function fitState(fresh) {
  const item = reference();
  const { grid, heads, prefix } = item.info;
  if (fresh && given.layer === undefined) state.layer = Math.floor(item.featureLayers * 0.55);
  state.layer = Math.min(state.layer, item.featureLayers - 1);
  if ((fresh && given.query === undefined) || state.query >= item.tokens) state.query = prefix.length + centre(grid);
  if (state.head !== "mean" && state.head >= heads) state.head = "mean";
  if (!items().some((each) => hasView(each, state.view))) state.view = "similarity";
  state.off = state.off.filter((patch) => patch < item.patches);
}

// Show an image, or the promise of one, on one side. `number` is that of an offered image. Whatever was asked for last stays:
// a large photo can take longer than the small one that was dropped after it.
async function open(blob, name, slot = 0, model = null, number = null) {
  const request = ++newest[slot];
  const outdated = () => request !== newest[slot];
  hideError();
  try {
    await starting; // a file can be dropped while the model still loads
    if (outdated()) return;
    showBusy(`Computing ${name} …`);
    const item = await openItem(await blob, name, model ?? byId("model").value);
    if (outdated()) {
      item.close();
      return;
    }
    item.number = number;
    place(item, slot);
    if (number === null) keepUpload(item);
    setPlaces({ [slot ? "image2" : "image"]: number, [slot ? "model2" : "model"]: start.models.length > 1 || slot ? item.info.model : null });
  } catch (error) {
    if (outdated()) return;
    showError(error, name);
    if (stages.length) byId("model").value = stages[0].item.info.model;
    draw(); // the line for screen readers is that of the shown map again
  } finally {
    if (!outdated()) showBusy("");
  }
}

function showBusy(text) {
  document.body.classList.toggle("busy", text !== "");
  byId("busy").textContent = text;
  if (text) byId("status").textContent = text;
}

function openOffered(number, slot = 0, model = null) {
  return open(source.offered(number), start.images[number], slot, model, number);
}

// --- drawing ---

function needs(token) {
  for (const item of items()) {
    if (state.view === "attention" && item.info.attention) item.needAttention(item.layerLike(reference(), state.layer), item.tokenLike(reference(), token));
  }
}

function draw() {
  if (!stages.length) return;
  state.layer = nearestLayer(reference().info.saved_layers, state.layer);
  const maps = items().map((item) => currentMap(item, reference()) || null);
  shareScale(maps, reference());
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
  if (state.hover === null && (maps[0] || state.view === "colours")) byId("status").textContent = maps[0] ? describeMap(maps[0]) : `${stages[0].words().join(", ")}.`;
  document.body.dataset.drawn = maps[0] ? String(maps[0].query ?? "all") : ""; // the query whose map is on the screen, for tests
}

let panelTimer = 0;
function drawPanel() {
  clearTimeout(panelTimer);
  panelTimer = 0;
  showPanel(byId("panel"), items(), reference());
}

// A saved page of a large model has only some layers.
function nearestLayer(layers, wanted) {
  if (!layers?.length) return wanted;
  return layers.reduce((best, layer) => (Math.abs(layer - wanted) < Math.abs(best - wanted) ? layer : best));
}

function drawControls() {
  const item = reference();
  const info = item.info;
  byId("model-line").textContent = modelLine(stages[0].item.info);
  byId("model-line").title = byId("model-line").textContent; // the line is cut off where it is too long
  choices(byId("views"), "tab", VIEWS.filter((view) => items().some((each) => hasView(each, view))).map((view) => [view, ...NAMES[view]]), state.view, (view) => update({ view }), "stages");
  byId("stages").setAttribute("aria-labelledby", `views-${state.view}`);
  choices(byId("tabs"), "tab", PANELS, state.panel, (panel) => update({ panel }), "panel");
  const heads = [["mean", "mean"], ...[...Array(info.heads).keys()].map((head) => [head, String(head)])];
  choices(byId("heads"), "radio", heads, state.head, (head) => update({ head }));
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

function modelLine(info) {
  const layers = info.layers ? ` · ${info.layers} layers × ${info.heads} heads` : "";
  return `${info.name} · ${info.image_size.join("×")} pixels · ${(info.parameters / 1e6).toFixed(1)} M parameters${layers}`;
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
let maskedFor = ""; // the patches that `item.masked` of the shown images answers to
let maskedTimer = 0;
let maskedRequest = 0;
function predictMasked() {
  const wanted = state.off.join(".");
  if (wanted === maskedFor || source.saved) return;
  maskedFor = wanted;
  const request = ++maskedRequest;
  clearTimeout(maskedTimer);
  maskedTimer = setTimeout(async () => {
    try {
      for (const item of items()) {
        const patches = item.offLike(reference(), state.off);
        const found = patches.length && item.info.predictions.length ? await item.predictWithout(patches) : null;
        if (request !== maskedRequest) return;
        item.masked = found;
      }
      redraw();
    } catch (error) {
      if (request === maskedRequest) showError(error);
    }
  }, 80);
}

// --- errors and dialogs ---

function showError(error, name = "") {
  const message = error.message ?? String(error);
  byId("error-text").textContent = name ? `${name}: ${message.replace(/^the image: /, "")}` : message;
  byId("error").hidden = false;
}

function hideError() {
  byId("error").hidden = true;
}

// Ask once, however many requests need it.
let asked = null;
function askForToken(again) {
  asked ??= enteredToken(again).finally(() => (asked = null));
  return asked;
}

function enteredToken(again) {
  const dialog = byId("token-dialog");
  if (again) byId("token-hint").textContent = "This token was not accepted. Enter the server’s VITRAIL_TOKEN.";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    const closed = () =>
      dialog.returnValue === "send" ? resolve(byId("token").value) : reject(new Error("This server answers only with its token. Reload the page to enter it."));
    dialog.addEventListener("close", closed, { once: true });
  });
}

function closeButton() {
  const button = element("button", { type: "button", class: "close", "aria-label": "End the comparison", title: "End the comparison" }, ["×"]);
  button.addEventListener("click", showOne);
  return button;
}

function showOne() {
  newest[1]++; // one that is still computed must not appear
  const before = reference();
  stages[1]?.item.close();
  stages.length = 1;
  setPlaces({ image2: null, model2: null });
  arrange(before);
  byId("compare-button").focus();
}

function setUpCompare() {
  const dialog = byId("compare-dialog");
  byId("compare-button").addEventListener("click", () => {
    const options = [["same", "the same image"], ...start.images.map((name, number) => [number, name]), ...uploads.map(({ name }, number) => [`upload ${number}`, name]), ...(source.saved ? [] : [["file", "choose a file …"]])];
    byId("compare-image").replaceChildren(...options.map(([value, label]) => element("option", { value: String(value) }, [label])));
    byId("compare-model").replaceChildren(...start.models.map((name) => element("option", { value: name }, [name])));
    const { name: shown, info } = stages[0].item;
    const other = start.images.findIndex((name) => name !== shown);
    byId("compare-image").value = stages[1]?.item.number ?? (start.models.length > 1 || other < 0 ? "same" : String(other));
    byId("compare-model").value = stages[1]?.item.info.model ?? start.models.find((name) => name !== info.model) ?? info.model;
    byId("compare-none").hidden = stages.length < 2;
    dialog.showModal();
  });
  byId("compare-show").addEventListener("click", () => {
    dialog.close();
    const [image, model] = [byId("compare-image").value, byId("compare-model").value];
    if (image === "file") byId("compare-file").click();
    else if (image === "same") open(stages[0].item.blob, stages[0].item.name, 1, model, stages[0].item.number);
    else if (image.startsWith("upload ")) {
      const { blob, name } = uploads[Number(image.slice("upload ".length))];
      open(blob, name, 1, model);
    } else openOffered(Number(image), 1, model);
  });
  byId("compare-file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) open(file, file.name, 1, byId("compare-model").value);
    event.target.value = "";
  });
  byId("compare-none").addEventListener("click", () => {
    dialog.close();
    showOne();
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
    take(event.dataTransfer.files[0]);
  });
}

function setUpControls() {
  byId("error-close").addEventListener("click", hideError);
  byId("depth").addEventListener("input", (event) => update({ layer: Number(event.target.value) }));
  for (const id of ["fusion", "scale", "style"]) byId(id).addEventListener("change", (event) => update({ [id]: event.target.value }));
  for (const id of ["residual", "pixels"]) byId(id).addEventListener("change", (event) => update({ [id]: event.target.checked }));
  byId("model").addEventListener("change", () => open(stages[0].item.blob, stages[0].item.name, 0, byId("model").value, stages[0].item.number));
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
  const buttons = start.images.map((name, number) => thumbnail(name, () => openOffered(number)));
  const add = element("button", { type: "button", class: "thumbnail add", id: "add-image", "aria-label": "Choose an image" }, ["+"]);
  add.addEventListener("click", () => byId("file").click());
  byId("gallery").replaceChildren(...buttons, ...uploads.map(({ button }) => button), ...(source.saved ? [] : [add]));
  if (source.saved) byId("drop-hint").textContent = "A saved page: it works without a server and shows its own images. `vitrail explore` opens others.";
  if (start.credit) byId("drop-hint").append(` ${start.credit}`);
  for (const [number, button] of buttons.entries()) {
    try {
      const picture = await offeredPicture(number);
      drawThumbnail(button, picture);
      picture.close(); // a photo of 12 megapixels is 48 MB
    } catch {
      /* its name must do */
    }
  }
}

async function offeredPicture(number) {
  const blob = await source.offered(number);
  return source.saved ? (await openItem(blob, start.images[number], start.models[0])).photo : createImageBitmap(blob);
}

function keepUpload({ blob, name, photo }) {
  if (uploads.some((each) => each.blob === blob)) return;
  const button = thumbnail(name, () => open(blob, name));
  drawThumbnail(button, photo);
  uploads.push({ blob, name, button });
  byId("add-image")?.before(button);
}

function thumbnail(name, show) {
  const canvas = element("canvas", { width: "96", height: "96", "aria-hidden": "true" });
  const button = element("button", { type: "button", class: "thumbnail", title: name, "aria-label": `Show ${name}` }, [canvas]);
  button.addEventListener("click", show);
  return button;
}

function drawThumbnail(button, bitmap) {
  const side = Math.min(bitmap.width, bitmap.height);
  button.firstChild.getContext("2d").drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 96, 96);
}

const { found: given, opened } = readAddress();
const isFresh = location.hash === ""; // nothing was chosen yet

async function begin() {
  Object.assign(state, given);
  starting = source.start((models) => showBusy(`Loading ${models.join(", ")} …`));
  setUpFiles();
  setUpControls();
  setUpCompare();
  setUpTour(reference);
  onChange(draw);
  showBusy("Connecting …");
  start = await starting;
  byId("model").replaceChildren(...start.models.map((name) => element("option", { value: name }, [name])));
  if (start.models.includes(opened.model)) byId("model").value = opened.model;
  if (source.saved && isFresh) opened.model2 = start.models[1]; // it was saved to compare them
  const chosen = (text) => (Number(text) < start.images.length ? Math.max(0, Number(text) || 0) : 0);
  if (start.images.length && !newest[0]) await openOffered(chosen(opened.image ?? 0)); // unless a file was dropped meanwhile
  if (stages.length && (opened.image2 !== undefined || opened.model2 !== undefined)) {
    const model = start.models.includes(opened.model2) ? opened.model2 : start.models[0];
    await openOffered(chosen(opened.image2 ?? opened.image ?? 0), 1, model);
    Object.assign(state, given); // counted in the reference of both
    fitState(true);
    redraw();
  }
  await showGallery();
}

begin().catch((error) => {
  showBusy("");
  showError(error);
});
