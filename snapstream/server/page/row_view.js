// One answer's row: legend, choice of layer and head, the strip, what the reader points at, and the shaded text.

import { count, element, visible } from "./format.js";
import { Strip } from "./strip.js";
import { TokenText } from "./tokens.js";

export function rowView(row, factText) {
  const fact = row.find(factText);
  const told = element("p", { className: "told" });
  const hooks = {
    onToken: (token) => tell(token),
    onPick: (token) => {
      tell(token);
      strip.mark(token);
      text.reveal(token);
    },
  };
  const strip = new Strip(row, fact, hooks);
  const text = new TokenText(row, fact, { onToken: tell, onPick: (token) => { tell(token); strip.mark(token); text.mark(token); } });
  const layers = choice("Layer", "all layers", row.numLayers);
  const heads = choice("Head", "all heads", row.numHeads);
  const chosen = () => [layers, heads].map(({ select }) => (select.value === "all" ? null : Number(select.value)));

  function tell(token) {
    const [layer, head] = chosen();
    const kept = row.counts(layer, head)[token];
    const where = { sink: "sink", recent: "recent ring", topk: kept ? "top-k" : "evicted" }[row.region(token)];
    told.replaceChildren(
      "token ", element("b", {}, count(token)), " ", element("q", {}, visible(row.texts[token] ?? "")), ` ${where}, kept by `,
      element("b", {}, `${kept} of ${row.size(layer, head)}`), ` heads${layersOf(row, token, layer, head)}`,
    );
  }

  function show() {
    strip.show(...chosen());
    text.show(...chosen());
    tell(strip.cursor);
  }

  layers.select.addEventListener("change", show);
  heads.select.addEventListener("change", show);
  const start = fact ? fact[0] : 0;
  strip.mark(start);
  tell(start);
  const controls = element("div", { className: "row-controls" }, layers.label, heads.label);
  if (fact) controls.append(element("button", { type: "button", onclick: () => hooks.onPick(fact[0]) }, "Show the sentence that answers"));
  const view = element("div", { className: "row-view" }, controls, legend(row, fact), strip.canvas, told, text.view);
  if (fact) {
    // Once it has a size. An IntersectionObserver, because the view may be closed for now.
    const watcher = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      watcher.disconnect();
      if (text.marked === null) text.reveal(fact[0]); // the reader may have chosen a place by then
    });
    watcher.observe(text.view);
  }
  return view;
}

// In which layers, where the choice has several.
function layersOf(row, token, layer, head) {
  if (layer !== null || row.numLayers === 1) return "";
  const kept = [];
  for (let index = 0; index < row.numLayers; index += 1) if (row.counts(index, head)[token]) kept.push(index);
  if (!kept.length) return "";
  return kept.length === row.numLayers ? " in all layers" : ` in ${kept.length === 1 ? "layer" : "layers"} ${kept.join(", ")}`;
}

function choice(name, all, size) {
  const select = element("select", { ariaLabel: name }, element("option", { value: "all" }, all));
  for (let index = 0; index < size; index += 1) select.append(element("option", { value: String(index) }, `${name.toLowerCase()} ${index}`));
  return { select, label: element("label", { className: "inline" }, `${name} `, select) };
}

function legend(row, fact) {
  const sample = (name, words) => element("li", {}, element("span", { className: name }, "text"), ` ${words}`);
  const items = [
    sample("topk kept-0", "evicted everywhere"),
    sample("topk kept-3", "kept by some heads"),
    sample("topk kept-8", `kept by all (${count(row.numTopk)} selected per head)`),
    sample("recent kept-8", `ring of the last ${count(row.numRecent)}`),
  ];
  if (row.numSink) items.splice(3, 0, sample("sink kept-8", `${count(row.numSink)} sinks`));
  if (fact) items.push(sample("topk kept-0 fact", "the sentence that answers, ▲ in the strip"));
  return element("ul", { className: "legend", "aria-label": "Legend" }, ...items);
}
