// What is shown, as a picture or as numbers.

import { element } from "./dom.js";
import { state } from "./state.js";
import { legendColour } from "./colours.js";
import { formatted } from "./maps.js";

export function savePng(stages) {
  const [margin, side, below] = [24, 640, 84];
  const heights = stages.map((stage) => Math.round((side * stage.canvas.height) / stage.canvas.width));
  const sheet = element("canvas", { width: String(margin + stages.length * (side + margin)), height: String(2 * margin + Math.max(...heights) + below) });
  const context = sheet.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, sheet.width, sheet.height);
  stages.forEach((stage, number) => {
    const left = margin + number * (side + margin);
    context.drawImage(stage.canvas, left, margin, side, heights[number]);
    caption(context, stage, left, margin + heights[number] + 22, side);
  });
  sheet.toBlob((blob) => offer(blob, "vitrail.png"), "image/png");
}

function caption(context, stage, left, top, side) {
  const map = stage.item.shown;
  context.fillStyle = "#1a1822";
  context.font = "600 16px system-ui, sans-serif";
  const [title, detail] = stage.words();
  context.fillText(fitting(context, title, side), left, top);
  context.font = "13px system-ui, sans-serif";
  context.fillText(fitting(context, [detail, stage.item.info.model, stage.item.name].join(" · "), side), left, top + 20);
  if (!map) return;
  for (let k = 0; k < 200; k++) {
    context.fillStyle = legendColour(k / 199, map.signed, state.style);
    context.fillRect(left + k, top + 34, 1, 10);
  }
  context.fillStyle = "#1a1822";
  context.fillText(`${formatted(map.scale.low, map.unit)} to ${formatted(map.scale.high, map.unit)}`, left + 210, top + 44);
}

// The text, or as much of it as fits and an ellipsis.
function fitting(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let count = text.length;
  while (count && context.measureText(`${text.slice(0, count)}…`).width > width) count--;
  return `${text.slice(0, count)}…`;
}

export function saveJson(stages) {
  const content = {
    about: "Vitrail explorer. Layers, heads, tokens and patches are counted from 0; patches by row. Attention has 8 bits per weight.",
    state: { ...state, hover: undefined },
    items: stages.map(({ item }) => ({
      image: item.name,
      model: item.info.model,
      architecture: item.info.name,
      grid: item.info.grid,
      image_size: item.info.image_size,
      preprocess: item.info.preprocess,
      predictions: item.masked?.predictions ?? item.info.predictions,
      largest_error_of_a_weight: item.info.attention?.max_error ?? null,
      map: item.shown && {
        title: item.shown.title, detail: item.shown.detail, unit: item.shown.unit === "percent" ? "fraction" : item.shown.unit,
        query: item.shown.query, prefix: item.shown.prefix && Object.fromEntries(item.info.prefix.map((name, k) => [name, item.shown.prefix[k]])),
        patches: rows(item.shown.patches, item.info.grid[1]),
      },
    })),
  };
  offer(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }), "vitrail.json");
}

function rows(values, columns) {
  const found = [];
  for (let start = 0; start < values.length; start += columns) found.push([...values.subarray(start, start + columns)]);
  return found;
}

function offer(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
