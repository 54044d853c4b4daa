// Numbers and elements as the page shows them. Text always goes in as text, never as HTML.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function milliseconds(value) {
  return value < 10 ? `${value.toFixed(1)} ms` : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export const percent = (share) => `${share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;

// element("p", {className: "quiet", onclick: f}, "text", child)
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// A token as it can be seen: blanks and control characters have signs of their own.
export function visible(text) {
  return text === "" ? "(part of a character)" : text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
