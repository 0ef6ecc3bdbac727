// One analysed image: what is known of it, and its maps as they arrive.

const MOST_ROWS = 400; // queries kept of a model whose layers are too large to be sent whole
const FAILURE_SECONDS = 3; // until something that failed is asked for again

export class Item {
  constructor(source, info, blob, name) {
    Object.assign(this, { source, info, blob, name });
    this.layers = new Map(); // layer → {scales, values} of [head, query, key]
    this.rows = new Map(); // query, or layer:query → {scales, values}
    this.results = new Map(); // path → what it answered
    this.waiting = new Map(); // path → promise
    this.failed = new Map(); // path → message
    this.onArrival = () => {};
    this.shown = null; // the map that is drawn
    this.masked = null; // predictions with patches off, and how many are
    this.number = null; // of an image that the page offers
    this.closed = false;
    this.tokens = info.prefix.length + info.grid[0] * info.grid[1];
    this.patches = info.grid[0] * info.grid[1];
  }

  // It is no longer shown: free its pictures, and load no more of its layers.
  close() {
    this.closed = true;
    this.picture?.close();
    this.photo?.close();
  }

  async openPictures() {
    const read = async (path, type) => createImageBitmap(new Blob([await this.source.get(this, path)], { type }));
    this.picture = await read("picture", "image/png");
    this.photo = this.info.photo ? await read("photo", "image/jpeg") : this.picture;
  }

  // Ask for something once; what it answers is kept, and the page is drawn again.
  load(path, accept) {
    if (this.waiting.has(path) || this.failed.has(path)) return this.waiting.get(path);
    const promise = this.source
      .get(this, path)
      .then(accept)
      .catch((error) => {
        this.failed.set(path, error.message);
        setTimeout(() => this.failed.delete(path), FAILURE_SECONDS * 1000); // a full queue, say: the next look asks again
      })
      .finally(() => {
        this.waiting.delete(path);
        this.onArrival();
      });
    this.waiting.set(path, promise);
    return promise;
  }

  failure() {
    return this.failed.size ? [...this.failed.values()].at(-1) : null;
  }

  // Weights of one query to all tokens, or null while they are on their way.
  attention(layer, head, query) {
    const { heads } = this.info;
    const whole = this.layers.get(layer);
    const all = whole ? null : this.rows.get(query);
    const one = whole || all ? null : this.rows.get(`${layer}:${query}`);
    if (!whole && !all && !one) return null;
    const found = whole || all || one;
    const row = (h) => (whole ? h * this.tokens + query : all ? layer * heads + h : h);
    const result = new Float32Array(this.tokens);
    const chosen = head === "mean" ? [...Array(heads).keys()] : [head];
    for (const h of chosen) {
      const start = row(h) * this.tokens;
      const factor = found.scales[row(h)] / (255 * chosen.length);
      for (let k = 0; k < this.tokens; k++) result[k] += factor * found.values[start + k];
    }
    return result;
  }

  needAttention(layer, query) {
    const { send } = this.info.attention;
    if (send === "layer") {
      if (!this.layers.has(layer)) this.loadLayer(layer);
    } else {
      const key = send === "query" ? query : `${layer}:${query}`;
      if (!this.rows.has(key)) this.loadRow(key, send === "query" ? `attention?query=${query}` : `attention?layer=${layer}&query=${query}`);
    }
  }

  loadLayer(layer) {
    return this.load(`attention?layer=${layer}`, (buffer) => this.layers.set(layer, split(buffer, this.info.heads * this.tokens)));
  }

  loadRow(key, path) {
    const count = (typeof key === "number" ? this.info.layers : 1) * this.info.heads;
    return this.load(path, (buffer) => {
      this.rows.set(key, split(buffer, count));
      if (this.rows.size > MOST_ROWS) this.rows.delete(this.rows.keys().next().value);
    });
  }

  // The other layers follow one by one, so that the overview fills and the slider never waits. One that fails is asked for again.
  async prefetch(first) {
    if (!this.info.attention || this.info.attention.send !== "layer") return;
    const layers = this.info.saved_layers || [...Array(this.info.layers).keys()];
    let missing = [...layers].sort((a, b) => Math.abs(a - first) - Math.abs(b - first));
    for (let attempt = 0; attempt < 3; attempt++) {
      if (attempt) await new Promise((resolve) => setTimeout(resolve, FAILURE_SECONDS * 1000 + 200));
      for (const layer of missing) {
        if (this.closed) return;
        if (!this.layers.has(layer)) await this.loadLayer(layer);
      }
      missing = missing.filter((layer) => !this.layers.has(layer));
      if (!missing.length) return;
    }
    throw new Error(`Attention of ${missing.length > 1 ? "layers" : "layer"} ${missing.join(", ")} is missing. ${this.failure() ?? ""}`);
  }

  // Cosine similarities of one token to all others.
  similarity(layer, query) {
    return this.signed(`similarity?layer=${layer}`, query, this.tokens);
  }

  positions(patch) {
    return this.signed("positions", patch, this.patches);
  }

  signed(path, query, width) {
    const small = this.source.saved || width * width <= 2 << 20; // a server sends more query by query
    const found = this.result(small ? path : `${path}${path.includes("?") ? "&" : "?"}query=${query}`, (buffer) => new Uint8Array(buffer));
    if (!found) return null;
    const start = small ? query * width : 0;
    return Float32Array.from(found.subarray(start, start + width), (value) => value / 127.5 - 1);
  }

  colours(layer) {
    const found = this.result("colours", (buffer) => new Uint8Array(buffer));
    return found && found.subarray(3 * layer * this.patches, 3 * (layer + 1) * this.patches);
  }

  rollout(fusion, residual) {
    const found = this.result(`rollout?fusion=${fusion}&residual=${residual}`, json);
    return found && Float32Array.from(found.weights);
  }

  distance() {
    return this.result("distance", json);
  }

  result(path, decode) {
    if (!this.results.has(path)) this.load(path, (buffer) => this.results.set(path, decode(buffer)));
    return this.results.get(path) ?? null;
  }

  async predictWithout(patches) {
    const options = { method: "POST", body: JSON.stringify({ patches }), headers: { "Content-Type": "application/json" } };
    return { count: patches.length, predictions: json(await this.source.get(this, "masked", options)).predictions };
  }

  // The patches whose centre lies in one of `off`, which are patches of another item.
  offLike(other, off) {
    if (other === this) return off;
    const hidden = new Set(off.map((patch) => other.info.prefix.length + patch));
    const mine = this.info.prefix.length;
    return [...Array(this.patches).keys()].filter((patch) => hidden.has(other.tokenLike(this, mine + patch)));
  }

  // The layer and the token that correspond to those of another item: the same relative depth, head and place.
  layerLike(other, layer) {
    if (!this.featureLayers || !other.featureLayers) return 0;
    return other === this ? layer : Math.round((layer * (this.featureLayers - 1)) / Math.max(1, other.featureLayers - 1));
  }

  get featureLayers() {
    return this.info.layers || 1; // a ResNet has features of its last map alone
  }

  tokenLike(other, token) {
    if (other === this) return token;
    const theirs = other.info.prefix.length;
    const mine = this.info.prefix.length;
    if (token < theirs) return mine ? Math.min(token, mine - 1) : mine + centre(this.info.grid);
    const [rows, columns] = other.info.grid;
    const row = Math.floor((token - theirs) / columns);
    const column = (token - theirs) % columns;
    const [r, c] = this.info.grid;
    return mine + Math.floor(((row + 0.5) * r) / rows) * c + Math.floor(((column + 0.5) * c) / columns);
  }

  tokenName(token) {
    const mine = this.info.prefix.length;
    if (token < mine) return `${this.info.prefix[token]} token`;
    const columns = this.info.grid[1];
    return `patch ${Math.floor((token - mine) / columns)}, ${(token - mine) % columns}`;
  }
}

export function centre([rows, columns]) {
  return Math.floor(rows / 2) * columns + Math.floor(columns / 2);
}

function json(buffer) {
  return JSON.parse(new TextDecoder().decode(buffer));
}

function split(buffer, count) {
  return { scales: new Float32Array(buffer.slice(0, 4 * count)), values: new Uint8Array(buffer, 4 * count) };
}
