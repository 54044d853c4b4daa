// The whole prompt as one canvas: above, how many heads kept each place (height and shade); below, a line per layer
// and head, or per layer where they are too many. Sinks and ring are hatched, so that nothing depends on hue alone.

const BARS = 52;
const GAP = 6;
const MARK = 9; // where the sentence that answers is marked
const MAX_HEAD_LINES = 48;

export class Strip {
  // onToken(token) is called as the reader points at a place, onPick(token) as one is chosen.
  constructor(row, fact, { onToken, onPick }) {
    Object.assign(this, { row, fact, onToken, onPick, layer: null, head: null, cursor: 0 });
    this.hasHeads = row.numLayers * row.numHeads <= MAX_HEAD_LINES;
    this.numLines = row.numLayers * (this.hasHeads ? row.numHeads : 1);
    this.line = Math.max(2, Math.min(7, Math.floor(160 / this.numLines)));
    this.height = BARS + MARK + GAP + this.numLines * this.line;
    this.picture = document.createElement("canvas"); // all but the cursor, which moves more often
    this.canvas = document.createElement("canvas");
    this.canvas.className = "strip";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "slider");
    this.canvas.setAttribute("aria-label", "Place in the prompt; arrow keys move, Enter shows it in the text");
    this.canvas.setAttribute("aria-valuemin", "0");
    this.canvas.setAttribute("aria-valuemax", String(row.numTokens - 1));
    this.canvas.addEventListener("pointermove", (event) => this.point(this.tokenAt(event)));
    this.canvas.addEventListener("click", (event) => this.onPick(this.tokenAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.canvas.style.height = `${this.height}px`;
  }

  show(layer, head) {
    Object.assign(this, { layer, head });
    this.draw();
  }

  // Move the cursor without telling anyone.
  mark(token) {
    this.cursor = token;
    this.paint();
  }

  point(token) {
    if (token === this.cursor) return;
    this.mark(token);
    this.onToken(token);
  }

  tokenAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const token = Math.floor(((event.clientX - box.left) / box.width) * this.row.numTokens);
    return Math.max(0, Math.min(this.row.numTokens - 1, token));
  }

  key(event) {
    const page = Math.max(1, Math.round(this.row.numTokens / 50));
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") this.onPick(this.cursor);
    else if (event.key in steps) this.point(Math.max(0, Math.min(this.row.numTokens - 1, this.cursor + steps[event.key])));
    else return;
    event.preventDefault();
  }

  draw() {
    const { canvas, picture } = this;
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = picture.width = Math.round(width * scale);
    canvas.height = picture.height = Math.round(this.height * scale);
    const pen = picture.getContext("2d");
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.scale(scale, scale);
    this.bars(pen, width, colour);
    this.lines(pen, width, colour);
    if (this.fact) this.factMark(pen, width, colour);
    this.cursorColour = colour("--text");
    this.paint();
  }

  // The picture and the cursor on it.
  paint() {
    const { canvas, picture, cursor } = this;
    canvas.setAttribute("aria-valuenow", String(cursor));
    if (!picture.width || !this.cursorColour) return;
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(picture, 0, 0);
    pen.fillStyle = this.cursorColour;
    pen.fillRect(Math.round(((cursor + 0.5) / this.row.numTokens) * canvas.width), 0, Math.max(1, Math.round(devicePixelRatio)), canvas.height);
  }

  bars(pen, width, colour) {
    const { row } = this;
    pen.fillStyle = colour("--track");
    pen.fillRect(0, 0, width, BARS);
    const size = row.size(this.layer, this.head);
    const cells = cellsOf(row.counts(this.layer, this.head), size, width, row.numSink, row.numTokens - row.numRecent, true);
    pen.fillStyle = colour("--keep");
    cells.forEach((share, x) => {
      if (!share) return;
      pen.globalAlpha = 0.35 + 0.65 * share;
      pen.fillRect(x, BARS * (1 - share), 1, BARS * share);
    });
    pen.globalAlpha = 1;
    const sinks = Math.max(row.numSink ? 4 : 0, (row.numSink / row.numTokens) * width);
    const ring = Math.max(4, (row.numRecent / row.numTokens) * width);
    this.hatch(pen, 0, sinks, colour("--sink"), 1);
    this.hatch(pen, width - ring, ring, colour("--recent"), -1);
  }

  // Diagonal stripes: rising for the sinks, falling for the ring.
  hatch(pen, left, width, colour, slope) {
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width, BARS);
    pen.clip();
    pen.globalAlpha = 0.3;
    pen.fillStyle = pen.strokeStyle = colour;
    pen.fillRect(left, 0, width, BARS);
    pen.globalAlpha = 1;
    pen.lineWidth = 1.5;
    for (let x = left - BARS; x < left + width + BARS; x += 5) {
      pen.beginPath();
      pen.moveTo(x, slope > 0 ? BARS : 0);
      pen.lineTo(x + BARS, slope > 0 ? 0 : BARS);
      pen.stroke();
    }
    pen.restore();
  }

  lines(pen, width, colour) {
    const { row } = this;
    for (let index = 0; index < this.numLines; index += 1) {
      const layer = this.hasHeads ? Math.floor(index / row.numHeads) : index;
      const head = this.hasHeads ? index % row.numHeads : null;
      const top = BARS + MARK + GAP + index * this.line;
      const isChosen = (this.layer === null || this.layer === layer) && (this.head === null || head === null || this.head === head);
      pen.fillStyle = colour("--track");
      pen.fillRect(0, top, width, this.line - 1);
      pen.fillStyle = colour("--keep");
      cellsOf(row.counts(layer, head), row.size(layer, head), width, 0, row.numTokens, false).forEach((share, x) => {
        if (!share) return;
        pen.globalAlpha = (isChosen ? 1 : 0.25) * (0.15 + 0.85 * share);
        pen.fillRect(x, top, 1, this.line - 1);
      });
      pen.globalAlpha = 1;
    }
  }

  factMark(pen, width, colour) {
    const [from, to] = this.fact.map((token) => (token / this.row.numTokens) * width);
    pen.fillStyle = colour("--text");
    pen.beginPath();
    const middle = (from + to) / 2;
    pen.moveTo(middle, BARS + 2);
    pen.lineTo(middle - 5, BARS + MARK);
    pen.lineTo(middle + 5, BARS + MARK);
    pen.fill();
  }
}

// Per column of pixels the share of kept heads: the greatest of its tokens, or their mean. Columns outside of
// [from, to) stay empty.
function cellsOf(counts, size, width, from, to, isGreatest) {
  const cells = new Float32Array(Math.ceil(width));
  for (let x = 0; x < cells.length; x += 1) {
    const low = Math.floor((x / width) * counts.length);
    const high = Math.max(low + 1, Math.floor(((x + 1) / width) * counts.length));
    let [most, sum, number] = [0, 0, 0];
    for (let token = Math.max(low, from); token < Math.min(high, to, counts.length); token += 1) {
      most = Math.max(most, counts[token]);
      sum += counts[token];
      number += 1;
    }
    cells[x] = number ? (isGreatest ? most : sum / number) / size : 0;
  }
  return cells;
}
