// Where numbers come from: the server, or the data inside a saved page. Both answer to the same paths.

export class ServerSource {
  constructor(askForToken) {
    this.askForToken = askForToken;
    this.token = null; // in memory alone, never in an address
    this.saved = false;
  }

  async start(onLoading) {
    for (;;) {
      const found = await (await this.checked(await this.request("/explorer/start"))).json();
      if (found.ready) return found;
      onLoading(found.models);
      await new Promise((resolve) => setTimeout(resolve, 500)); // the model still loads
    }
  }

  async offered(number) {
    return (await this.checked(await this.request(`/explorer/images/${number}`))).blob();
  }

  async analyse(blob, model) {
    const path = `/explorer/analyse?model=${encodeURIComponent(model)}`;
    const options = { method: "POST", body: blob, headers: { "Content-Type": "application/octet-stream" } };
    return (await this.checked(await this.request(path, options))).json();
  }

  // The server keeps few images; one that it has dropped is sent again, and the user does not notice.
  async get(item, path, options = {}) {
    const address = `/explorer/${item.info.id}/${path}`;
    let answer = await this.request(address, options);
    if (answer.status === 404 && (await answer.clone().text()).includes("no longer kept")) {
      await this.analyse(item.blob, item.info.model);
      answer = await this.request(address, options);
    }
    return (await this.checked(answer)).arrayBuffer();
  }

  async request(path, options = {}) {
    for (;;) {
      const sent = this.token;
      const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
      let answer;
      try {
        answer = await fetch(path, { ...options, headers });
      } catch {
        throw new Error("The server does not answer. Is it still running?");
      }
      if (answer.status !== 401) return answer;
      if (this.token === sent) this.token = await this.askForToken(sent !== null); // another request may have got a new one
    }
  }

  async checked(answer) {
    if (answer.ok) return answer;
    let message = `The server answered ${answer.status}.`;
    try {
      message = (await answer.json()).error || message;
    } catch {
      /* not JSON: the number must do */
    }
    throw new Error(message);
  }
}

export class SavedSource {
  constructor(data) {
    this.data = data;
    this.saved = true;
    this.numbers = new WeakMap(); // which image a blob of `offered` stands for
  }

  async start() {
    return { models: [...new Set(this.data.items.map((item) => item.info.model))], images: this.data.names, credit: this.data.credit };
  }

  async offered(number) {
    const blob = new Blob();
    this.numbers.set(blob, number);
    return blob;
  }

  async analyse(blob, model) {
    const name = this.data.names[this.numbers.get(blob)];
    const item = this.data.items.find((one) => one.name === name && one.info.model === model);
    if (!item) throw new Error("This saved page holds only its own images. Run `vitrail explore` to open others.");
    return item.info;
  }

  async get(item, path) {
    const text = this.data.items.find((one) => one.info.id === item.info.id).answers[path];
    if (text === undefined) throw new Error("This is not part of the saved page. Run `vitrail explore` to see it.");
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let k = 0; k < letters.length; k++) bytes[k] = letters.charCodeAt(k);
    return bytes.buffer;
  }
}

// A saved page carries its data in a block of its own; the page of a server has none.
export function openSource(askForToken) {
  const block = document.getElementById("saved-data");
  return block ? new SavedSource(JSON.parse(block.textContent)) : new ServerSource(askForToken);
}
