// From the state to the map that is shown: values per patch and per prefix token, a scale, and words for them.

import { state } from "./state.js";

const FUSIONS = { mean: "mean", max: "maximum", min: "minimum" };

export function shownQuery() {
  return state.hover ?? state.query;
}

// The map of one item; null while its numbers are on their way.
export function currentMap(item, reference) {
  const query = item.tokenLike(reference, shownQuery());
  const layer = item.layerLike(reference, state.layer);
  const head = state.head === "mean" ? "mean" : Math.min(state.head, item.info.heads - 1);
  if (state.view === "attention") return item.info.attention && attentionMap(item, layer, head, query);
  if (state.view === "rollout") return item.info.attention && rolloutMap(item);
  if (state.view === "similarity") return similarityMap(item, layer, query);
  if (state.view === "positions") return item.info.positions && positionMap(item, query);
  return null;
}

// Whether a view exists for a model at all.
export function hasView(item, view) {
  if (view === "attention" || view === "rollout") return Boolean(item.info.attention);
  return view === "positions" ? item.info.positions : true;
}

function attentionMap(item, layer, head, query) {
  item.needAttention(layer, query);
  const row = item.attention(layer, head, query);
  if (!row) return null;
  const { prefix, patches } = divided(item, row);
  const name = head === "mean" ? "mean of all heads" : `head ${head}`;
  return {
    item, query, layer, head, prefix, patches, signed: false, unit: "percent",
    title: `Attention of ${item.tokenName(query)}`,
    detail: `layer ${layer}, ${name}`,
    uniform: 1 / item.tokens,
    scale: { low: 0, high: maximum(patches) },
  };
}

function rolloutMap(item) {
  const patches = item.rollout(state.fusion, state.residual);
  if (!patches) return null;
  const start = { class: "the class token", mean: "the mean of all patches", map: "the pooling probe" }[item.info.pooling];
  return {
    item, query: null, prefix: null, patches, signed: false, unit: "percent",
    title: `Attention rollout from ${start}`,
    detail: `heads fused by ${FUSIONS[state.fusion]}, ${state.residual ? "with residual ½A + ½I" : "without residual"}`,
    uniform: 1 / item.tokens,
    scale: { low: Math.min(...patches), high: maximum(patches) },
  };
}

function similarityMap(item, layer, query) {
  const row = item.similarity(layer, query);
  if (!row) return null;
  const { prefix, patches } = divided(item, row);
  return {
    item, query, layer, prefix, patches, signed: true, unit: "cosine",
    title: `Similarity to ${item.tokenName(query)}`,
    detail: item.info.layers ? `cosine of features after layer ${layer}` : "cosine of the last feature map",
    scale: { low: -1, high: 1 },
  };
}

function positionMap(item, query) {
  const patch = query - item.info.prefix.length;
  if (patch < 0) return null;
  const patches = item.positions(patch);
  return (
    patches && {
      item, query, prefix: null, patches, signed: true, unit: "cosine",
      title: `Position similarity to ${item.tokenName(query)}`,
      detail: "cosine of position embeddings, the same for every image",
      scale: { low: -1, high: 1 },
    }
  );
}

// One scale for all layers and heads of the shown query, from what has arrived.
export function commonScale(items, reference) {
  let high = 0;
  for (const item of items) {
    const query = item.tokenLike(reference, shownQuery());
    for (let layer = 0; layer < item.info.layers; layer++) {
      for (let head = 0; head < item.info.heads; head++) {
        const row = item.attention(layer, head, query);
        if (row) high = Math.max(high, maximum(row.subarray(item.info.prefix.length)));
      }
    }
  }
  return { low: 0, high };
}

// Several maps side by side share one colour scale.
export function shareScale(maps, reference) {
  const found = maps.filter(Boolean);
  if (!found.length) return;
  const all = state.scale === "all" && state.view === "attention";
  const [lows, highs] = [found.map((map) => map.scale.low), found.map((map) => map.scale.high)];
  const scale = all ? commonScale(found.map((map) => map.item), reference) : { low: Math.min(...lows), high: Math.max(...highs) };
  for (const map of found) map.scale = scale;
}

export function formatted(value, unit) {
  if (unit === "percent") return `${percent(100 * value)} %`;
  return value.toFixed(2).replace("-", "−");
}

// Two digits that count, down to thousandths: a weight is small where there are many tokens.
function percent(value) {
  const digits = [9.95, 0.995, 0.0995].filter((limit) => value < limit).length;
  return value ? value.toFixed(digits) : "0";
}

export function strongest(map) {
  let best = 0;
  for (let k = 1; k < map.patches.length; k++) if (map.patches[k] > map.patches[best]) best = k;
  return best;
}

function divided(item, row) {
  const count = item.info.prefix.length;
  return { prefix: row.subarray(0, count), patches: row.subarray(count) };
}

function maximum(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}
