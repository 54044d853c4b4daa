// What the reader writes: a message, and a long text before it, typed, pasted, dropped, opened, or an example.

import { count } from "./format.js";

const MAX_FILE_BYTES = 32 * 2 ** 20; // the server takes no larger body

export class Composer {
  // api: for examples; onChange(): something was written; onFault(error).
  constructor(api, { onChange, onFault }) {
    Object.assign(this, { api, onChange, onFault, example: null, seed: 0 });
    this.message = document.getElementById("message");
    this.document = document.getElementById("document");
    this.attachment = document.getElementById("attachment");
    this.size = document.getElementById("document-size");
    for (const field of [this.message, this.document]) field.addEventListener("input", () => this.changed());
    document.getElementById("example").addEventListener("click", () => this.loadExample());
    const file = document.getElementById("file");
    file.addEventListener("change", () => this.open(file.files[0]).then(() => (file.value = "")));
    addEventListener("dragover", (event) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
    addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("dropping");
      const { files } = event.dataTransfer;
      if (files.length) this.open(files[0]);
      else this.set({ document: event.dataTransfer.getData("text/plain"), message: this.message.value });
    });
  }

  // { document, message, content, example } as it stands, or null if nothing was written.
  take() {
    const [text, message] = [this.document.value, this.message.value];
    const content = [text, message].filter((part) => part.trim()).join("\n\n");
    if (!content) return null;
    const isExample = this.example?.document === text && this.example?.question === message;
    return { document: text, message, content, example: isExample ? this.example : null };
  }

  set({ document: text = "", message = "", example = null }) {
    this.document.value = text;
    this.message.value = message;
    this.example = example;
    this.attachment.open = Boolean(text);
    this.changed();
  }

  changed() {
    const { length } = this.document.value;
    this.size.textContent = length ? `${count(length)} characters` : "optional";
    this.onChange();
  }

  async loadExample() {
    try {
      const size = Number(document.getElementById("example-size").value);
      const example = await this.api.example(size, this.seed);
      this.seed += 1; // the next one is another
      this.set({ document: example.document, message: example.question, example });
      this.message.focus();
    } catch (error) {
      this.onFault(error);
    }
  }

  async open(file) {
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) {
      this.onFault(new Error(`${file.name} has ${count(file.size)} bytes; the limit is ${count(MAX_FILE_BYTES)}.`));
      return;
    }
    this.set({ document: await file.text(), message: this.message.value });
  }
}
