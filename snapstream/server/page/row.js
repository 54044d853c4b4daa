// What a row kept of its prompt, from the bitmap of the answer: per layer and kv head, or summed over any of them.
// Bit t % 8 of byte t / 8 of a head is its prompt token t; every head begins on a byte of its own, layer after layer.

export class Row {
  // bitmap: as in the API; cache: { num_sink, num_topk, num_recent }; texts: what each prompt token adds to the text.
  constructor(bitmap, cache, texts) {
    this.numLayers = bitmap.num_layers;
    this.numHeads = bitmap.num_kv_heads;
    this.numTokens = bitmap.num_tokens;
    this.numSink = cache.num_sink;
    this.numTopk = cache.num_topk;
    this.numRecent = cache.num_recent;
    this.texts = texts;
    this.bits = Uint8Array.from(atob(bitmap.bits), (char) => char.charCodeAt(0));
    this.width = Math.ceil(this.numTokens / 8);
    this.sums = new Map();
  }

  isKept(layer, head, token) {
    const place = (layer * this.numHeads + head) * this.width;
    return (this.bits[place + (token >> 3)] >> (token & 7)) & 1;
  }

  // For every token how many of the chosen heads kept it; null stands for all layers, or all heads.
  counts(layer, head) {
    const name = `${layer}/${head}`;
    if (!this.sums.has(name)) this.sums.set(name, this.sum(layer, head));
    return this.sums.get(name);
  }

  // How many heads a choice has.
  size(layer, head) {
    return (layer === null ? this.numLayers : 1) * (head === null ? this.numHeads : 1);
  }

  region(token) {
    if (token < this.numSink) return "sink";
    return token >= this.numTokens - this.numRecent ? "recent" : "topk";
  }

  // Tokens [from, to) of the first place where this text stands in the prompt; null if it does not.
  find(text) {
    const start = text ? this.texts.join("").indexOf(text) : -1;
    if (start < 0) return null;
    let [from, to, offset] = [0, 0, 0];
    this.texts.forEach((piece, token) => {
      if (offset <= start) from = token;
      if (offset < start + text.length) to = token + 1;
      offset += piece.length;
    });
    return [from, to];
  }

  sum(layer, head) {
    const total = new Uint16Array(this.numTokens);
    const layers = layer === null ? range(this.numLayers) : [layer];
    const heads = head === null ? range(this.numHeads) : [head];
    for (const l of layers) {
      for (const h of heads) {
        const place = (l * this.numHeads + h) * this.width;
        for (let byte = 0; byte < this.width; byte += 1) {
          let bits = this.bits[place + byte];
          for (let token = byte * 8; bits; token += 1, bits >>= 1) total[token] += bits & 1;
        }
      }
    }
    return total;
  }
}

const range = (size) => Array.from({ length: size }, (_, index) => index);
