// What the page asks of the server: limits, token texts, an example, and answers as they come.
// Every failure is a Fault with words for a reader; the key lives in the field and nowhere else.

export class Fault extends Error {
  constructor(words, { status = 0, retryAfter = null, code = null } = {}) {
    super(words);
    Object.assign(this, { status, retryAfter, code });
  }
}

export class Api {
  constructor(readKey) {
    this.readKey = readKey;
  }

  // The first served model with its limits.
  async model(signal) {
    return (await this.json("v1/models", undefined, signal)).data[0];
  }

  example(tokens, seed) {
    return this.json(`v1/page/example?tokens=${tokens}&seed=${seed}`);
  }

  // { count, max_model_len, token_texts }
  tokenize(request, signal) {
    const { messages, prompt } = request;
    const body = messages ? { messages } : { prompt };
    return this.json("tokenize", { ...body, return_token_texts: true }, signal);
  }

  // Yields the chunks of a streamed answer.
  async *stream(path, body, signal) {
    const response = await this.fetch(path, body, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await reader.read().catch((error) => {
          if (error.name === "AbortError") throw error;
          throw new Fault("The server ended, or the connection to it broke, before the answer was complete.");
        });
        if (done) throw new Fault("The connection ended before the answer was complete.");
        const frames = (rest + value).split("\n\n");
        rest = frames.pop();
        for (const frame of frames) {
          const data = frame.replace(/^data: /, "");
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Fault(`The answer broke off: ${chunk.error.message}`, { code: chunk.error.code });
          yield chunk;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async json(path, body, signal) {
    const response = await this.fetch(path, body, signal);
    return response.json();
  }

  async fetch(path, body, signal) {
    const headers = {};
    const key = this.readKey();
    if (!/^[!-~]*$/.test(key)) throw new Fault("An API key has neither spaces nor characters beyond ASCII; this one does.", { status: 401 });
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Fault("The server cannot be reached. Is it still running?");
    }
    if (!response.ok) throw await fault(response);
    return response;
  }
}

async function fault(response) {
  const { status } = response;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, not ours
  }
  const again = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  const message = error.message ?? `The server answered with status ${status}.`;
  return new Fault(words(status, message, error.code, again), { status, retryAfter, code: error.code });
}

function words(status, message, code, again) {
  if (status === 401) return "This server asks for an API key, and the one given is missing or wrong. Put it into the field “API key”.";
  if (status === 413) return `The text is too large to be sent: ${message}`;
  if (status === 429) return `The server is busy: all rows are in use and the queue is full.${again}`;
  if (status === 503) return `The server takes no requests now: ${message}.${again}`;
  if (code === "context_length_exceeded") return `The text is too long for this model. ${message}`;
  if (status >= 500) return `The server failed: ${message}`;
  return `The server refused this request: ${message}`;
}
