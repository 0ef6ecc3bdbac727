// Small helpers for elements.

export function element(name, attributes = {}, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

// A row of buttons of which one is chosen; arrow keys move along it. `role` is tab or radio; tabs control `controlled`.
export function choices(root, role, entries, chosen, choose, controlled = null) {
  const marked = role === "tab" ? "aria-selected" : "aria-checked";
  const key = JSON.stringify(entries);
  if (root.dataset.entries !== key) {
    root.dataset.entries = key; // built again only when the entries change, so that focus stays
    root.replaceChildren(
      ...entries.map(([value, label, title]) => {
        const more = { ...(title && { title }), ...(controlled && { "aria-controls": controlled }) };
        const button = element("button", { type: "button", role, id: `${root.id}-${value}`, "data-value": String(value), ...more }, [label]);
        button.addEventListener("click", () => choose(value));
        return button;
      }),
    );
    root.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ...(role === "radio" && { ArrowDown: 1, ArrowUp: -1 }) }[event.key];
      if (!step) return;
      const buttons = [...root.children];
      const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
      next.focus();
      next.click();
      event.preventDefault();
    };
  }
  for (const button of root.children) {
    const active = button.dataset.value === String(chosen);
    button.setAttribute(marked, String(active));
    button.tabIndex = active ? 0 : -1;
  }
}
