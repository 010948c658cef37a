// Make and change elements. Text is inserted only as text: nothing in these files writes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Make an HTML element; a child is an element or a text. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Make a text that can be changed: change the document only when the text differs. */
export class Text {
  constructor(words = "") {
    this.node = document.createTextNode(words);
    this.words = words;
  }

  set(words) {
    if (words === this.words) return;
    this.words = words;
    this.node.data = words;
  }
}

/** Make a sentence; its commands, in backticks, are shown as code, and all of it is text. */
export function prose(words) {
  return (words ?? "").split("`").map((piece, place) => (place % 2 ? element("code", {}, piece) : piece));
}

/** Set an attribute, or remove it for null, only when it changes. */
export function attribute(of, name, value) {
  if (value === null) {
    if (of.hasAttribute(name)) of.removeAttribute(name);
  } else if (of.getAttribute(name) !== String(value)) of.setAttribute(name, value);
}

/** Give a parent these children in this order, and move only those in the wrong place. */
export function arrange(parent, children) {
  let place = parent.firstChild;
  for (const child of children) {
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

/** Find an element of the page by its id. */
export const byId = (id) => document.getElementById(id);
