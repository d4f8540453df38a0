// Nodes that are made once and then changed, so that selection, focus and tooltips stay.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  set(node, attributes);
  // append() takes text as text, so nothing from the store can become markup.
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

// Each writes only what differs: an equal text that is written again would drop a selection.
export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

export function text(node, value) {
  if (node.textContent !== String(value)) node.textContent = value;
}

export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

// One child of `host` for each item, in order. `make(item)` makes one, `update(node, item)` changes
// it. Nodes of items that are still there stay the same nodes.
export function keyed(host, items, keyOf, make, update = () => {}) {
  const known = new Map([...host.children].map((node) => [node.dataset.key, node]));
  let at = host.firstChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = known.get(key);
    known.delete(key);
    if (node === undefined) {
      node = make(item);
      node.dataset.key = key;
    }
    update(node, item);
    if (node === at) at = at.nextSibling;
    else host.insertBefore(node, at);
  }
  for (const node of known.values()) node.remove();
  while (at !== null) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// Names with a value and a line below it.
export function figures(host, rows) {
  keyed(host, rows, ([name]) => name,
    ([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("span"), element("small"))),
    (node, [, value, more]) => {
      const [shown, below] = node.lastChild.children;
      text(shown, value);
      text(below, more ?? "");
    });
}
