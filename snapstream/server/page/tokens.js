// The prompt's text, token by token, shaded by how many of the chosen heads kept each. Blocks of tokens are filled as
// they come near the reader's view and emptied as they leave it: a long prompt costs no more than what is seen.

import { count, element } from "./format.js";

const BLOCK = 256; // tokens, at most
const SHORTEST = 192; // a block ends with a sentence or a line if one ends from here on
const NEAR = 3; // blocks on either side of a place: more than the margin around the view
const LEVELS = 8;
const LINE = 22; // pixels, an estimate until a block was seen
const CHAR = 7.3;

export class TokenText {
  constructor(row, fact, { onToken, onPick }) {
    Object.assign(this, { row, fact, layer: null, head: null, marked: null });
    this.view = element("div", { className: "text", tabIndex: 0, role: "group", "aria-label": "Prompt, shaded by what was kept" });
    this.blocks = [];
    this.starts = startsOf(row.texts);
    this.blocks = this.starts.map((_, index) => this.block(index));
    this.view.append(...this.blocks);
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.isIntersecting ? this.fill(entry.target) : this.empty(entry.target);
    }, { root: this.view, rootMargin: "400px" });
    for (const block of this.blocks) this.watcher.observe(block);
    const told = (act) => (event) => {
      const token = event.target.dataset?.token;
      if (token !== undefined) act(Number(token));
    };
    this.view.addEventListener("pointerover", told(onToken));
    this.view.addEventListener("click", told(onPick));
  }

  show(layer, head) {
    Object.assign(this, { layer, head });
    for (const block of this.blocks) if (block.childElementCount) this.shade(block);
  }

  // Scroll to a token and mark it. Blocks that come near the view are filled first: until then their heights are
  // estimates, and the place would move as they are filled.
  reveal(token) {
    const index = this.indexOf(token);
    const near = this.blocks.slice(Math.max(0, index - NEAR), index + NEAR + 1);
    for (const block of near) this.fill(block);
    this.mark(token);
    const shift = this.span(token).getBoundingClientRect().top - this.view.getBoundingClientRect().top;
    this.view.scrollTop += shift - this.view.clientHeight / 2;
    for (const block of near) {
      this.watcher.unobserve(block); // and is told anew which of them stay
      this.watcher.observe(block);
    }
  }

  mark(token) {
    this.span(this.marked)?.classList.remove("marked");
    this.marked = token;
    this.span(token)?.classList.add("marked");
  }

  // The element of a token, where its block is filled.
  span(token) {
    if (token === null) return null;
    const index = this.indexOf(token);
    return this.blocks[index].children[token - this.starts[index]] ?? null;
  }

  indexOf(token) {
    return this.starts.findLastIndex((start) => start <= token);
  }

  textsOf(index) {
    return this.row.texts.slice(this.starts[index], this.starts[index + 1]);
  }

  block(index) {
    const numChars = this.textsOf(index).join("").length;
    const block = element("div", { className: "block", "data-index": String(index), "data-position": count(this.starts[index]) });
    block.style.minHeight = `${Math.ceil((numChars * CHAR) / 640) * LINE}px`;
    return block;
  }

  fill(block) {
    if (block.childElementCount) return;
    const index = Number(block.dataset.index);
    const spans = this.textsOf(index).map((text, offset) => {
      const span = document.createElement("span");
      span.textContent = text;
      span.dataset.token = String(this.starts[index] + offset);
      return span;
    });
    block.append(...spans);
    block.style.minHeight = "";
    this.shade(block);
  }

  empty(block) {
    if (!block.childElementCount) return;
    block.style.minHeight = `${block.offsetHeight}px`;
    block.replaceChildren();
  }

  shade(block) {
    const { row, fact } = this;
    const counts = row.counts(this.layer, this.head);
    const size = row.size(this.layer, this.head);
    for (const span of block.children) {
      const token = Number(span.dataset.token);
      const level = counts[token] ? Math.max(1, Math.round((counts[token] / size) * LEVELS)) : 0;
      const isFact = fact && token >= fact[0] && token < fact[1];
      const isMarked = token === this.marked; // its block may have been emptied since
      span.className = `${row.region(token)} kept-${level}${isFact ? " fact" : ""}${isMarked ? " marked" : ""}`;
    }
  }
}

function startsOf(texts) {
  const starts = [];
  for (let start = 0; start < texts.length; ) {
    starts.push(start);
    let stop = start + SHORTEST;
    while (stop < start + BLOCK && !/[.!?]$|\n/.test(texts[stop - 1] ?? "")) stop += 1;
    start = stop;
  }
  return starts;
}
