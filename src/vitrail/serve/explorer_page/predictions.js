// Predictions as bars; with patches off, the bars before are drawn behind.

import { element } from "./dom.js";

const MOST_LABELS = 7; // the six best, and of those before patches were switched off one more
let shownFor = null;

export function showPredictions(root, items) {
  const now = items.flatMap((item) => [item, item.masked]); // they do not depend on the query: hovering leaves them alone
  if (shownFor && now.length === shownFor.length && now.every((each, k) => each === shownFor[k])) return;
  shownFor = now;
  root.replaceChildren(...items.map((item) => one(item, items.length > 1)));
}

function one(item, named) {
  const { predictions, score } = item.info;
  const found = item.masked?.predictions ?? predictions;
  const shown = score === "value" ? found : found.slice(0, MOST_LABELS);
  const parts = named ? [element("h3", { title: item.name }, [`${item.name} · ${item.info.model}`])] : [];
  if (!predictions.length) return element("div", { class: "prediction-group" }, [...parts, element("p", { class: "hint" }, ["This model has no trained head: it has features, but no predictions."])]);
  const before = new Map(predictions.map((each) => [each.index, each.score]));
  const range = score === "value" ? rangeOf([...predictions, ...shown].map((each) => each.score)) : [0, 1];
  if (item.masked) parts.push(element("p", { class: "hint" }, [`${item.masked.count} of ${item.patches} patches off. The outline is the prediction of the whole image.`]));
  if (item.info.task === "multilabel" && shown.some((each) => !each.chosen)) parts.push(element("p", { class: "hint" }, ["Grey: below the label’s threshold."]));
  const kinds = ["bars", ...(score === "value" ? [] : ["ranked"]), ...(item.masked ? ["changed"] : [])]; // values are in the order of the outputs
  const bars = shown.map((each) => bar(each, item.masked ? before.get(each.index) : undefined, range, score));
  return element("div", { class: "prediction-group" }, [...parts, element("ol", { class: kinds.join(" ") }, bars)]);
}

function bar(each, before, range, score) {
  const fill = barFrom(each.chosen ? "fill" : "fill below", each.score, range);
  const track = element("span", { class: "track", "aria-hidden": "true" }, [fill, ...(before === undefined ? [] : [barFrom("ghost", before, range)])]);
  const change = before === undefined || score === "value" ? [] : [element("small", {}, [` ${signed(100 * (each.score - before))}`])];
  return element("li", {}, [
    element("span", { class: "label", title: each.label }, [each.label]),
    track,
    element("span", { class: "number" }, [scoreText(each.score, score), ...change]),
  ]);
}

// The range of bars that begin at 0.
export function rangeOf(values) {
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  return high > low ? [low, high] : [0, 1];
}

// A bar from 0 to a value, which may be negative, inside a track that goes over the range.
export function barFrom(kind, value, [low, high]) {
  const made = element("i", { class: kind });
  made.style.left = `${(100 * (Math.min(0, value) - low)) / (high - low)}%`;
  made.style.width = `${(100 * Math.abs(value)) / (high - low)}%`;
  return made;
}

export function scoreText(value, score) {
  return score === "value" ? value.toPrecision(4).replace("-", "−") : `${(100 * value).toFixed(1)} %`;
}

function signed(value) {
  const text = Math.abs(value).toFixed(1);
  return `${text === "0.0" ? "±" : value < 0 ? "−" : "+"}${text}`;
}
