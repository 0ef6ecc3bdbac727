// A short tour: each step chooses a view and names the part of the page it is about.

import { byId } from "./dom.js";
import { centre } from "./item.js";
import { update } from "./state.js";

// `item` is the first image; steps that its model has nothing for are left out.
function steps(item) {
  const last = item.featureLayers - 1;
  const patch = item.info.prefix.length + centre(item.info.grid);
  const attends = Boolean(item.info.attention);
  return [
    {
      title: "The image in patches", target: ".frame", changes: { view: attends ? "attention" : "similarity", layer: last, head: "mean", query: patch, panel: "heads" },
      text: `The model cuts the image into ${item.info.grid[0]} × ${item.info.grid[1]} patches and turns each into a token. The framed patch is the query: the map shows ${attends ? "which patches it reads from" : "which patches have similar features"}. Move over the image, or use the arrow keys; a click or a tap keeps a patch.`,
    },
    attends && {
      title: "Layer by layer", target: "#depth-control", changes: { view: "attention", layer: 0, head: "mean", query: patch },
      text: "This is layer 0. Move the slider to the right and watch where the query reads from. In large trained models some heads of the first layers look nearby, and those of the last ones far (the paper’s Fig. 7); the panel Distance says how it is here.",
    },
    attends && {
      title: "All heads at once", target: "#panel", changes: { view: "attention", layer: Math.floor(last / 2), head: 0, query: patch, panel: "heads" },
      text: "Every square is one head of one layer, for the same query. Click a square to open that head on the image.",
    },
    item.info.read_out && attends && {
      title: "A prediction grows", target: "#panel", changes: { view: "attention", layer: last, head: "mean", panel: "layers" },
      text: "What the model would predict if it stopped after each layer: final norm and head on that layer’s tokens. The layers were not trained for this, so the first ones guess.",
    },
    {
      title: "Features as colours", target: ".frame", changes: { view: "colours", layer: last },
      text: "Three principal components of the patch features, as red, green and blue. Patches with similar colours have similar features in these components, whatever they look like.",
    },
    item.info.predictions.length && !item.source.saved && {
      title: "Does a patch matter?", target: "#predictions-card", changes: { view: attends ? "rollout" : "similarity", layer: last, panel: "off" },
      text: "Attention says where tokens read, not why the model decides. To test what matters, switch patches off: click some on the image and watch the bars.",
    },
  ].filter(Boolean);
}

export function setUpTour(getItem) {
  let list = [];
  let number = 0;
  const show = () => {
    const step = list[number];
    update({ ...step.changes, hover: null, ...(number === 0 ? { off: [] } : {}) }); // the first step shows the whole image
    byId("tour").hidden = false;
    byId("tour-count").textContent = `${number + 1} of ${list.length}`;
    byId("tour-title").textContent = step.title;
    byId("tour-text").textContent = step.text;
    byId("tour-back").disabled = number === 0;
    byId("tour-next").textContent = number === list.length - 1 ? "Explore" : "Next";
    byId("tour").classList.toggle("beside-panel", step.target === "#panel"); // where it hides nothing of what it is about
    requestAnimationFrame(() => requestAnimationFrame(() => byId("tour").hidden || point(step.target))); // when the view is drawn
  };
  const end = () => {
    byId("tour").hidden = true;
    point(null);
    byId("tour-button").focus();
  };
  byId("tour-button").addEventListener("click", () => {
    list = steps(getItem());
    number = 0;
    show();
    byId("tour-next").focus();
  });
  byId("tour-end").addEventListener("click", end);
  byId("tour-back").addEventListener("click", () => {
    number = Math.max(0, number - 1);
    show();
  });
  byId("tour-next").addEventListener("click", () => {
    number += 1;
    if (number < list.length) show();
    else end();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && !byId("tour").hidden && end());
}

function point(selector) {
  for (const marked of document.querySelectorAll(".pointed")) marked.classList.remove("pointed");
  const target = selector && document.querySelector(selector);
  if (!target) return;
  target.classList.add("pointed");
  const covered = matchMedia("(max-width: 900px)").matches ? byId("tour").offsetHeight + 12 : 0; // at the foot of a phone
  target.style.scrollMarginBottom = `${covered + 28}px`;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ block: "nearest", behavior: calm ? "auto" : "smooth" });
}
