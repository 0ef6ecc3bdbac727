// Predictions as bars; with patches off, the bars before are drawn behind.

import { element } from "./dom.js";
import { state } from "./state.js";

let shownFor = null;

export function showPredictions(root, items) {
  const now = items.flatMap((item) => [item, item.masked]); // they do not depend on the query: hovering leaves them alone
  if (shownFor && now.length === shownFor.length && now.every((each, k) => each === shownFor[k])) return;
  shownFor = now;
  root.replaceChildren(...items.map((item) => one(item, items.length > 1)));
}

function one(item, named) {
  const { predictions, score } = item.info;
  const shown = item.masked ?? predictions;
  const parts = named ? [element("h3", {}, [`${item.name} · ${item.info.model}`])] : [];
  if (!predictions.length) return element("div", { class: "prediction-group" }, [...parts, element("p", { class: "hint" }, ["This model has no trained head: it has features, but no predictions."])]);
  const before = new Map(predictions.map((each) => [each.index, each.score]));
  const most = score === "value" ? Math.max(...predictions.map((each) => Math.abs(each.score)), 1e-9) : 1;
  const list = element("ol", { class: item.masked ? "bars changed" : "bars" }, shown.slice(0, 7).map((each) => bar(each, before.get(each.index), most, score, item.masked)));
  if (item.masked) parts.push(element("p", { class: "hint" }, [`${state.off.length} of ${item.patches} patches off. The outline is the prediction of the whole image.`]));
  return element("div", { class: "prediction-group" }, [...parts, list]);
}

function bar(each, before, most, score, masked) {
  const text = score === "value" ? each.score.toPrecision(4) : `${(100 * each.score).toFixed(1)} %`;
  const fill = element("i", { class: each.chosen ? "fill" : "fill below" });
  fill.style.width = `${(100 * Math.abs(each.score)) / most}%`;
  const track = element("span", { class: "track", "aria-hidden": "true" }, [fill]);
  if (masked && before !== undefined) {
    const ghost = element("i", { class: "ghost" });
    ghost.style.width = `${(100 * Math.abs(before)) / most}%`;
    track.append(ghost);
  }
  const change = masked && before !== undefined && score !== "value" ? signed(100 * (each.score - before)) : "";
  return element("li", {}, [
    element("span", { class: "label" }, [each.label]),
    track,
    element("span", { class: "number" }, [text, ...(change ? [element("small", {}, [` ${change}`])] : [])]),
  ]);
}

function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)}`;
}
