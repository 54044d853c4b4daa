// The page: reads the server's limits, sends conversations, and lets answers grow. One answer runs at a time.
// api.js talks to the server, composer.js is what is written, transcript.js what is shown.

import { Api } from "./api.js";
import { chooseBudget } from "./budget.js";
import { Composer } from "./composer.js";
import { count } from "./format.js";
import { AnswerView, questionNode } from "./transcript.js";

const COUNT_DELAY_MS = 350;
const LOADING_DELAY_MS = 1500;
const MAX_SHOWN = 1e7; // characters: beyond it nothing is counted while it is written

const $ = (id) => document.getElementById(id);
const api = new Api(() => $("key").value.trim());
const composer = new Composer(api, { onChange: () => recount(), onFault: notice });
const isNarrow = matchMedia("(max-width: 820px)");
const turns = []; // { question, answer, nodes }
let model = null; // as /v1/models has it
let running = null; // AbortController of the answer that runs
let connecting = null; // AbortController of the question for the model
let counting = null; // AbortController of the count in the making
let counted = 0; // tokens of what would be sent

// The conversation so far, with one more message.
function asRequest(content) {
  const past = turns.flatMap(({ question, answer }) => [
    { role: "user", content: question.content },
    { role: "assistant", content: answer },
  ]);
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...past, { role: "user", content }];
  if (model.snapstream.has_chat_template) return { messages };
  return { prompt: messages.map((message) => message.content).join("\n") };
}

function sampling(numPrompt) {
  const [topK, seed] = [Number($("top_k").value), $("seed").value];
  return {
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: Math.min(Number($("max_tokens").value), model.max_model_len - numPrompt),
    ...(topK ? { top_k: topK } : {}),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

function budgetFor(numPrompt) {
  const choice = document.querySelector("input[name=share]:checked").value;
  const maxTokens = Math.min(Number($("max_tokens").value), model.max_model_len - numPrompt);
  return chooseBudget(choice, $("slots").valueAsNumber, numPrompt, maxTokens, model.snapstream);
}

async function connect() {
  connecting?.abort();
  const { signal } = (connecting = new AbortController());
  for (;;) {
    try {
      model = await api.model(signal);
      break;
    } catch (error) {
      if (signal.aborted) return; // another key was given meanwhile: what this one was told is no longer news
      $("model").textContent = "not connected";
      notice(error);
      if (error.status === 401) askForKey();
      if (error.status !== 503 || error.retryAfter === null) return;
      await new Promise((done) => setTimeout(done, LOADING_DELAY_MS));
      if (signal.aborted) return;
    }
  }
  notice(null);
  const { max_budget: most, min_budget: least, max_rows: rows, has_examples: hasExamples } = model.snapstream;
  $("model").textContent = `${model.id} · context of ${count(model.max_model_len)} tokens · ${rows} rows of up to ${count(most)} slots`;
  Object.assign($("slots"), { min: least, max: most, value: Math.min(most, Math.max(least, 512)) });
  $("max_tokens").max = model.max_model_len;
  $("example-field").hidden = !hasExamples;
  for (const option of $("example-size").options) option.disabled = Number(option.value) > model.max_model_len;
  recount();
}

function notice(error) {
  $("notice").hidden = !error;
  $("notice").textContent = error ? error.message : "";
}

// Tell what would be sent, a moment after the last change.
function recount() {
  $("slots-field").hidden = document.querySelector("input[name=share]:checked").value !== "slots";
  clearTimeout(recount.timer);
  recount.timer = setTimeout(countTokens, COUNT_DELAY_MS);
}

async function countTokens() {
  counting?.abort();
  if (!model || running) return;
  const written = composer.take();
  counted = 0;
  if (written && written.content.length < MAX_SHOWN) {
    counting = new AbortController();
    try {
      counted = (await api.tokenize(asRequest(written.content), counting.signal)).count;
    } catch (error) {
      if (error.name === "AbortError") return;
      $("count").textContent = error.message;
      return;
    }
  }
  const limit = model.max_model_len;
  const isOver = counted >= limit;
  $("count").textContent = counted ? `${count(counted)} tokens${isOver ? `, over the limit of ${count(limit)}` : ""}` : "";
  const { min_budget: least, max_budget: most } = model.snapstream;
  $("budget-note").textContent = counted ? budgetFor(counted).note : `${count(least)} to ${count(most)} slots on this server`;
}

async function send() {
  const question = composer.take();
  if (!question || running || !$("settings").reportValidity()) return;
  notice(null);
  if (!model) await connect();
  if (!model) return;
  counting?.abort();
  const aborter = (running = new AbortController());
  const view = new AnswerView();
  const turn = { question, answer: "", nodes: [] };
  turn.nodes = [questionNode(question, () => edit(turn)), view.node];
  $("welcome").hidden = true;
  $("conversation").append(...turn.nodes);
  setRunning(true);
  composer.set({});
  follow(true);
  let [isKept, hasKeyFault] = [false, false];
  try {
    isKept = await answer(question, view, turn, aborter.signal);
    $("status").textContent = "The answer is complete.";
  } catch (error) {
    isKept = Boolean(turn.answer);
    view.end(error.name === "AbortError" ? "stopped; its row is free" : "incomplete");
    if (error.name !== "AbortError") notice(error);
    $("status").textContent = error.name === "AbortError" ? "The answer was stopped." : error.message;
    hasKeyFault = error.status === 401;
  }
  running = null;
  setRunning(false);
  if (isKept) turns.push(turn);
  else restore(turn);
  if (hasKeyFault) askForKey();
  recount();
}

// Run one answer to its end; its text grows in turn.answer.
async function answer(question, view, turn, signal) {
  const request = asRequest(question.content);
  const { count: numPrompt, token_texts: texts } = await api.tokenize(request, signal);
  const limits = model.snapstream;
  if (numPrompt >= model.max_model_len) {
    throw new Error(`The text is too long: ${count(numPrompt)} tokens with its question; this model's limit is ${count(model.max_model_len)}.`);
  }
  const { slots, note } = budgetFor(numPrompt);
  if (slots === null) throw new Error(note);
  $("budget-note").textContent = note;
  const isDrawable = numPrompt * limits.num_layers * limits.num_kv_heads <= limits.max_kept_bits;
  const body = {
    ...request,
    ...sampling(numPrompt),
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    kv_cache: { budget: slots, return_kept: isDrawable ? "bitmap" : false },
  };
  const began = performance.now();
  const run = { texts, example: question.example, firstTokenMs: 0, finish: null, facts: null, usage: null };
  let numTokens = 0;
  for await (const chunk of api.stream(request.messages ? "v1/chat/completions" : "v1/completions", body, signal)) {
    run.facts = chunk.snapstream ?? run.facts;
    run.usage = chunk.usage ?? run.usage;
    const [choice] = chunk.choices;
    if (!choice) continue;
    run.firstTokenMs ||= performance.now() - began;
    const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
    turn.answer += text;
    view.add(turn.answer === text ? text.trimStart() : text);
    view.running((numTokens += 1));
    run.finish = choice.finish_reason ?? run.finish;
    follow(false);
  }
  const isFollowed = isNearEnd();
  view.finish(run);
  if (isFollowed) view.node.scrollIntoView({ block: "start" });
  return true;
}

// What scrolls: the conversation, or on a narrow screen the whole page.
function pane() {
  return isNarrow.matches ? document.scrollingElement : $("conversation");
}

function isNearEnd() {
  const { scrollHeight, scrollTop, clientHeight } = pane();
  return scrollHeight - scrollTop - clientHeight < 160;
}

// Keep the end in view while the reader is there; always, after something was sent.
function follow(isForced) {
  if (isForced || isNearEnd()) pane().scrollTop = pane().scrollHeight;
}

function askForKey() {
  $("more").open = true;
  $("key").focus();
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  for (const button of document.querySelectorAll(".edit, #clear, #example")) button.disabled = isRunning;
  if (isRunning) $("stop").focus();
  else $("message").focus();
}

// A question that got no answer goes back to where it was written, unless something else was written meanwhile.
function restore(turn) {
  for (const node of turn.nodes) node.remove();
  $("welcome").hidden = turns.length > 0;
  if (!composer.take()) composer.set(turn.question);
}

function edit(turn) {
  const index = turns.indexOf(turn);
  if (index < 0 || running) return;
  for (const { nodes } of turns.splice(index)) for (const node of nodes) node.remove();
  $("welcome").hidden = turns.length > 0;
  composer.set(turn.question);
  $("message").focus();
}

function clear() {
  if (running) return;
  for (const { nodes } of turns.splice(0)) for (const node of nodes) node.remove();
  $("welcome").hidden = false;
  notice(null);
  composer.set({});
  $("message").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("input", (event) => event.target === $("key") || recount());
$("key").addEventListener("change", () => connect());
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
if (isNarrow.matches) $("more").open = false;
composer.changed();
connect();
