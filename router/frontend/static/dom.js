// Elements made and updated with the least work: what is on the page stays where it is, and keeps its focus.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: `h("li.quiet", {title: "x", onclick: f}, "text", child)`. */
export function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  set(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make an SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

/** Set a text, unless it is there already: a screen reader reads what is written again. */
export function text(element, value) {
  const shown = String(value);
  if (element.textContent !== shown) element.textContent = shown;
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Let the children of `parent` be those of `entries` ([key, value] pairs), in this order: each is made once by
 * `make(key)`, and shown by `update(element, value, key)`.
 */
export function keyed(parent, entries, make, update) {
  const known = (parent.known ??= new Map());
  const wanted = new Set(entries.map(([key]) => key));
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
  let before = null;
  for (const [key, value] of entries) {
    let element = known.get(key);
    if (!element) known.set(key, (element = make(key)));
    update(element, value, key);
    const next = before ? before.nextSibling : parent.firstChild;
    if (element !== next) parent.insertBefore(element, next);
    before = element;
  }
}

export const byId = (id) => document.getElementById(id);
export const movesFreely = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;
