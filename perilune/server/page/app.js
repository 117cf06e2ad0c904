// The conversation, the requests to the server, and the browser's storage.

const $ = id => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "max_tokens",
                  "max_thinking_tokens", "seed"];
const KEPT = ["system", "tools", "tool_choice", "schema", ...SAMPLING];  // fields that come back with the next visit
const MOST_CHATS = 50;
const MOST_CHARS = 2000000;  // of all kept chats as JSON; browsers refuse more than about 5,000,000
const REFRESH_MS = 60;  // between two renderings of a growing answer
const WEATHER = [{type: "function", function: {
  name: "get_weather", description: "Get the current weather of a city",
  parameters: {type: "object", properties: {city: {type: "string", description: "name of the city"}}, required: ["city"]},
}}];
const PERSON = {
  type: "object", properties: {name: {type: "string"}, age: {type: "integer"}, city: {type: "string"}},
  required: ["name", "age", "city"], additionalProperties: false,
};

let chat = fresh();
let model = {};  // the server's entry of /v1/models
let running = null;  // the AbortController of the answer in flight

function fresh() {
  return {id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: []};
}

// ---- what the browser keeps

/** JSON of this browser's storage; `other` where there is none, or it is broken or forbidden. */
function stored(name, other) {
  try {
    return JSON.parse(localStorage.getItem(`perilune.${name}`)) ?? other;
  } catch {
    return other;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(`perilune.${name}`, JSON.stringify(value));
    return true;
  } catch {  // full or forbidden
    return false;
  }
}

/** A stored message, or null for what this page did not write: other programs of this origin may write here too. */
function cleaned(message) {
  const text = name => (typeof message[name] === "string" ? {[name]: message[name]} : {});
  if (!["user", "assistant", "tool"].includes(message?.role) || typeof message.content !== "string") return null;
  const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).filter(call =>
    [call?.id, call?.function?.name, call?.function?.arguments].every(part => typeof part === "string"));
  return {
    role: message.role, content: message.content, ...text("reasoning_content"), ...text("tool_call_id"), ...text("note"),
    ...(Number.isFinite(message.thought) && {thought: message.thought}), ...(calls.length && {tool_calls: calls}),
    ...(message.role === "user" && Array.isArray(message.pictures) && {pictures: storedPictures(message.pictures)}),
  };
}

function chats() {
  const found = stored("chats", []);
  return (Array.isArray(found) ? found : []).filter(one => typeof one?.id === "string" && Array.isArray(one.messages))
    .map(one => ({id: one.id, messages: one.messages.map(cleaned).filter(Boolean)}));
}

/** A chat as the browser keeps it: of large pictures small copies, or none at all. */
function small(one, pictures = true) {
  return {id: one.id, messages: one.messages.map(({pictures: seen, ...message}) => ({
    ...message, ...(pictures && seen?.length && {pictures: keptPictures(seen)}),
  }))};
}

/** Puts `one` first; the oldest go where there are too many or they are too large; none for one too large alone. */
function keep(one) {
  const others = chats().filter(other => other.id !== one.id).map(other => small(other));
  const put = all => JSON.stringify(all).length <= MOST_CHARS && store("chats", all);
  [[small(one)], [small(one, false)], []].slice(one.messages.length && !one.forgotten ? 0 : 2).some(own => {
    let most = Math.min(others.length, MOST_CHATS - own.length);
    while (most >= 0 && !put([...own, ...others.slice(0, most)])) most--;
    return most >= 0;
  });
  listed();
}

function listed() {
  const buttons = () => [...$("history").querySelectorAll("button")], at = buttons().indexOf(document.activeElement);
  $("history").replaceChildren(...chats().map(one => {
    const asked = one.messages.find(message => message.role === "user");
    const title = asked?.content.slice(0, 80) || (asked?.pictures?.length ? "(a picture)" : "(no question)");
    return make("li", {},
      make("button", {type: "button", "aria-current": one.id === chat.id ? "true" : "false",
                      onclick: () => reopen(one.id)}, title),
      make("button", {type: "button", "aria-label": `delete: ${title}`, onclick: () => {
        store("chats", chats().filter(other => other.id !== one.id));
        forget(one.id === chat.id);
      }}, "×"));
  }));
  if (at >= 0) (buttons()[at] ?? $("text")).focus();  // the buttons are new ones
}

/** The chat on the page was deleted (`current`): an answer that is on its way does not bring it back. */
function forget(current) {
  if (!current) return listed();
  chat.forgotten = true;
  begin(fresh());
}

// ---- what is asked

function headers() {
  const key = $("key").value;
  if (/[^\0-\xff]/.test(key)) throw new Error("the API key has a character that no header can carry: copy it again");
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

/** The value of a field with JSON, null where it is empty; says what is wrong beside it, and throws. */
function json(name, check) {
  const text = $(name).value.trim();
  $(`${name}-fault`).textContent = "";
  $(name).removeAttribute("aria-invalid");
  if (!text) return null;
  try {
    return check(JSON.parse(text));
  } catch (e) {
    $(`${name}-fault`).textContent = `${name}: ${e.message}`;
    $(name).setAttribute("aria-invalid", "true");
    opened(true);
    $(name).focus();
    throw e;
  }
}

function tools(value) {
  if (!Array.isArray(value)) throw new Error("a list is needed: [{\"name\": …, \"parameters\": …}]");
  return value.map(tool => {
    const declared = tool?.type === "function" && tool.function ? tool : {type: "function", function: tool};
    if (typeof declared.function?.name !== "string") throw new Error("each function needs a name");
    return declared;
  });
}

function schema(value) {
  if (typeof value !== "object" || !value || Array.isArray(value)) throw new Error("an object is needed");
  return {type: "json_schema", json_schema: {name: "answer", schema: value, strict: true}};
}

function question() {
  const declared = json("tools", tools), format = json("schema", schema), system = $("system").value.trim();
  // Notes, times and pictures are this page's own fields.
  const sent = chat.messages.map(({note, thought, pictures, ...message}) => ({...message, content: content({...message, pictures})}));
  const thinks = model.thinking !== "never" && $("think").checked;
  const given = SAMPLING.filter(name => $(name).value !== "" && (thinks || name !== "max_thinking_tokens"));
  return {
    messages: [...(system ? [{role: "system", content: system}] : []), ...sent],
    stream: true, stream_options: {include_usage: true, continuous_usage_stats: true},
    ...Object.fromEntries(given.map(name => [name, Number($(name).value)])),
    ...(declared?.length && {tools: declared, tool_choice: $("tool_choice").value}),
    ...(format && {response_format: format}),
    ...(!thinks && model.thinking === "optional" && {thinking: {type: "disabled"}}),
  };
}

/** The objects of a server-sent stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", got; !(got = await reader.read()).done;) {
    const frames = (rest + got.value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (frame.startsWith("data: ") && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function failure(reply) {
  const text = await reply.text();
  if (reply.status === 401) { opened(true); $("key").focus(); }
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`the server answered ${reply.status}: ${text.slice(0, 300)}`);
  }
}

function progress(usage, begun, first) {
  const tokens = usage.completion_tokens, now = performance.now(), seconds = (now - first) / 1000;
  const details = usage.completion_tokens_details ?? {}, parts = [`${tokens} tokens`];
  if (tokens > 1 && seconds > 0) parts.push(`${Math.round((tokens - 1) / seconds)} tokens/s`);
  if (first > begun) parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  const right = details.accepted_prediction_tokens, wrong = details.rejected_prediction_tokens;
  if (right + wrong > 0) {
    parts.push(`${details.acceptance_length.toFixed(2)} tokens per drafted step, ${Math.round(100 * right / (right + wrong))} % of drafts accepted`);
  }
  if (usage.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}

/** Whether a question can be sent now: checked before the conversation is changed. */
function ready() {
  try {
    return !running && Boolean(question());
  } catch {  // said beside the field
    return false;
  }
}

/** Asks for the message that follows the chat's last one, and shows it as it comes. */
async function answer() {
  const asked = question(), mine = chat, control = running = new AbortController();
  keep(mine);  // with the question, should the page close before the answer
  const message = {role: "assistant", content: ""};
  mine.messages.push(message);
  draw();
  const box = $("talk").lastElementChild, begun = performance.now();
  box.classList.add("live");
  uncover();
  busy(true);
  let first = 0, finish = null, usage = null, ended = "", timer = 0, fault = "";
  const refresh = () => {
    timer = 0;
    const talk = $("talk"), stuck = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    if (usage && first) message.note = progress(usage, begun, first);
    box.update(message, false);
    if (stuck) talk.scrollTop = talk.scrollHeight;
  };
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: control.signal, body: JSON.stringify(asked),
    });
    if (!reply.ok) throw await failure(reply);
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (!first && (delta.reasoning_content || delta.content || delta.tool_calls)) first = performance.now();
      if (delta.reasoning_content) {
        message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
        message.thought = (performance.now() - begun) / 1000;
      }
      if (delta.content) message.content += delta.content;
      for (const part of delta.tool_calls ?? []) {
        message.tool_calls ??= [];
        const call = message.tool_calls[part.index] ??= {id: part.id, type: "function", function: {name: part.function.name, arguments: ""}};
        call.function.arguments += part.function.arguments ?? "";
      }
      finish = event.choices[0]?.finish_reason ?? finish;
      usage = event.usage ?? usage;
      timer ||= setTimeout(refresh, REFRESH_MS);
    }
    if (!finish) throw new Error("the connection ended before the answer did");
    if (finish === "length") ended = "cut off: max_tokens or the context is used up";
  } catch (e) {
    if (e.name === "AbortError") ended = "stopped";
    else fault = e instanceof TypeError ? `the server cannot be reached, or the connection broke (${e.message})` : e.message;
  }
  clearTimeout(timer);
  refresh();
  running = null;
  if (finish !== "tool_calls") message.tool_calls = (message.tool_calls ?? []).filter(call => parsed(call.function.arguments));
  if (!message.tool_calls?.length) delete message.tool_calls;
  message.note = [message.note, ended].filter(Boolean).join(" · ");
  // A question without an answer stays, to be edited or asked again.
  if (!message.content && !message.reasoning_content && !message.tool_calls) mine.messages.splice(mine.messages.indexOf(message), 1);
  busy(false);
  keep(mine);
  draw(mine === chat ? fault : "");  // also another chat: its form for calls is left out while an answer runs
  say(fault || ended || (message.tool_calls ? "the model calls tools: fill in the results" : "the answer is complete"));
}

const parsed = text => { try { return JSON.parse(text) ?? true; } catch { return null; } };

// ---- what is shown

function say(text) { $("status").textContent = text; }

function busy(on) {
  $("talk").setAttribute("aria-busy", on);
  $("send").textContent = on ? "stop" : "send";
  if (on) say("the model answers");
}

function opened(on) {
  $("panel").hidden = !on;
  $("open").setAttribute("aria-expanded", on);
}

const action = (name, act) => make("button", {type: "button", onclick: act}, name);

/** Removes message `i` and what follows, and asks again from there. */
function again(i) {
  if (!ready()) return;
  chat.messages.length = i;
  answer();
  $("talk").focus();
}

/** A message as an article, with `update(message, done)`. */
function shown(message, i) {
  const box = make("article", {class: message.role}), mine = message.role === "assistant";
  const name = {user: "you", assistant: "answer", tool: "result of a call"}[message.role];
  box.append(make("span", {class: "unseen"}, name));
  const summary = make("summary"), reasoning = make("div", {tabindex: "0", dir: "auto"});
  const thought = make("details", {hidden: true}, summary, reasoning);
  const said = make("div", {class: "said", dir: "auto"}), calls = make("div"), note = make("div", {class: "note"});
  const copying = make("button", {type: "button", onclick: () => copy(message.content || JSON.stringify(message.tool_calls), copying)}, "copy");
  const does = make("div", {class: "does"}, copying);
  if (message.role === "user" || (mine && !message.tool_calls)) does.append(action("edit", () => edit(message, i, said, does)));
  if (mine) does.append(action("regenerate", () => again(i)));
  if (message.role === "user") does.append(action("ask again", () => again(i + 1)));
  let folded = false;
  box.update = (now, done) => {
    if (now.reasoning_content) {
      const thinking = !done && !now.content && !now.tool_calls;
      thought.hidden = false;
      if (thinking) thought.open = true;
      else if (!folded) { folded = true; thought.open = false; }
      summary.textContent = `${thinking ? "thinking" : "thought"}${now.thought === undefined ? "" : ` for ${now.thought.toFixed(1)} s`}`;
      reasoning.textContent = now.reasoning_content;
    }
    if (mine) show(said, now.content);
    else { said.textContent = now.content; said.hidden = !now.content && seen.length > 0; }
    calls.replaceChildren(...(now.tool_calls ?? []).filter(Boolean).map(callBox));
    note.textContent = now.note ?? "";
    does.hidden = !done;
  };
  const seen = (message.pictures ?? []).map(shownPicture);
  box.append(...(seen.length ? [make("div", {class: "seen"}, ...seen)] : []), ...(mine ? [thought, said, calls, note] : [said]), does);
  box.update(message, true);
  return box;
}

function callBox(call) {
  const given = parsed(call.function.arguments);
  return make("div", {class: "call"}, make("header", {}, `call: ${call.function.name}`),
              make("pre", {tabindex: "0"}, make("code", {}, given ? JSON.stringify(given, null, 2) : call.function.arguments)));
}

function edit(message, i, said, does) {
  if (running) return;
  const field = make("textarea", {rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "edit the message"});
  field.value = message.content;
  said.hidden = false;
  const save = () => {
    if (!ready()) return;
    message.content = field.value;
    if (message.role === "user") return again(i + 1);
    chat.messages.length = i + 1;  // what followed answered another text
    keep(chat);
    draw();
  };
  field.addEventListener("keydown", e => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) save();
    if (e.key === "Escape" && !e.isComposing) { e.stopPropagation(); draw(); }
  });
  said.replaceChildren(field);
  does.replaceChildren(action(message.role === "user" ? "ask" : "save", save), action("cancel", () => draw()));
  field.focus();
}

/** Calls of the last answer that have no result yet. */
function waiting() {
  const last = chat.messages.findLastIndex(message => message.tool_calls);
  const answered = chat.messages.slice(last + 1).map(message => message.tool_call_id);
  if (last < 0 || chat.messages.slice(last + 1).some(message => message.role !== "tool")) return [];
  return chat.messages[last].tool_calls.filter(call => !answered.includes(call.id));
}

/** A form for the results of the calls that wait. */
function answering(calls) {
  const fields = calls.map(call => make("textarea", {rows: 2, spellcheck: "false", required: true}));
  const form = make("form", {class: "results", onsubmit: e => {
    e.preventDefault();
    if (!ready()) return;
    calls.forEach((call, i) => chat.messages.push({role: "tool", tool_call_id: call.id, content: fields[i].value}));
    answer();
  }}, ...calls.map((call, i) => make("div", {class: "call"},
    make("header", {}, `result of ${call.function.name}`), make("label", {}, make("span", {class: "unseen"}, `result of ${call.function.name}`), fields[i]))),
  make("button", {}, "send results"));
  return form;
}

/** Shows the whole chat; `fault` says why the last question has no answer. */
function draw(fault = "") {
  const talk = $("talk"), calls = running ? [] : waiting();
  talk.replaceChildren(...(chat.messages.length ? chat.messages.map(shown) : [empty()]));
  if (calls.length) talk.append(answering(calls));
  if (fault) talk.append(make("div", {class: "error"}, fault));
  talk.scrollTop = chat.messages.length ? talk.scrollHeight : 0;
  listed();
}

/** What this model can do, and questions to begin with. */
function empty() {
  const can = [], {capabilities = {}, max_model_len: context} = model;
  if (context) can.push(`reads and writes ${context.toLocaleString("en")} tokens of text in one conversation`);
  if (capabilities.thinking === "always") can.push("thinks before it answers, always");
  if (capabilities.thinking === "optional") can.push("thinks before it answers, or answers at once");
  if (capabilities.input?.includes("image")) can.push(`sees pictures${capabilities.input.includes("video") ? " and videos" : ""}: attach, paste or drop them`);
  if (capabilities.tools) can.push("calls tools that you declare in the settings; you answer the calls");
  if (capabilities.structured_output) can.push("answers by a JSON schema that you paste into the settings");
  if (capabilities.chat === false) can.push("has no chat template this server knows: it only continues text, at /v1/completions");
  if (model.synthetic) can.push(`runs on random weights (${model.synthetic}): its words mean nothing`);
  const ask = (text, filled = "") => action(text, () => {
    for (const [name, value] of [["tools", WEATHER], ["schema", PERSON]]) {
      const example = JSON.stringify(value, null, 1);
      // What the user wrote stays.
      if (["", example].includes($(name).value.trim())) $(name).value = name === filled ? example : "";
    }
    remember();
    submit(text);
  });
  return make("section", {class: "empty"}, make("h1", {}, model.id ? `Talk with ${model.id}` : "Perilune"),
    make("ul", {}, ...can.map(line => make("li", {}, line))),
    ...(capabilities.tools ? [make("div", {class: "tries"},
      ask("What is 347 + 589?"),
      ask("Please get the current weather for the city Oslo.", "tools"),
      ask("Extract name, age and city as JSON from: Emma is 34 years old and lives in Oslo.", "schema"))] : []));
}

/** Shows what the model recommends for the mode in fields that are empty. */
function recommend() {
  const defaults = model.sampling_defaults ?? {};
  const values = $("think").checked ? defaults.thinking : defaults.instant;
  for (const name of SAMPLING) $(name).placeholder = values?.[name] ?? "";
}

async function models() {
  try {
    const reply = await fetch("v1/models", {headers: headers()});
    if (!reply.ok) throw await failure(reply);
    model = (await reply.json()).data[0] ?? {};
  } catch (e) {
    const fault = e instanceof TypeError ? "the server cannot be reached" : e.message;
    return running ? say(fault) : draw(fault);  // else the growing answer would leave the page
  }
  model.thinking = model.capabilities?.thinking;
  $("model").textContent = document.title = model.id ?? "Perilune";
  $("thinks").hidden = model.thinking !== "optional";
  $("think").checked = model.thinking !== "never";
  recommend();
  seeing();
  if (!running) draw();
}

/** On a narrow screen settings cover the conversation. */
function uncover() { if (matchMedia("(max-width: 48rem)").matches) opened(false); }

function begin(one) {
  uncover();
  if (one.id === chat.id) return;
  running?.abort();
  chat = one;
  draw();
  $("text").focus();
}

/** Opens a kept chat as it is now: another tab may have gone on with it, or deleted it. */
function reopen(id) {
  const one = chats().find(kept => kept.id === id);
  if (one) begin(one);
  else listed();
}

/** Another tab has changed the kept chats: shows the chat of this page as it is now, else its next answer would undo that. */
function changed() {
  const now = chats().find(kept => kept.id === chat.id), said = one => JSON.stringify(one.messages.map(message => message.content));
  if (!now || running || said(now) === said(chat)) return listed();
  chat = now;
  draw();
}

function submit(text) {
  if (waiting().length) {
    say("answer the calls first, or regenerate");
    return document.querySelector(".results textarea").focus();
  }
  if (!ready()) return;
  const pictures = taken();
  chat.messages.push({role: "user", content: text, ...(pictures.length && {pictures})});
  $("text").value = "";
  answer();
}

function remember() {
  store("settings", Object.fromEntries(KEPT.map(name => [name, $(name).value])));
  marked();
}

/** Names the settings that change answers, as the panel is mostly closed. */
function marked() {
  const set = KEPT.filter(name => name !== "tool_choice" && $(name).value.trim());
  $("open").textContent = set.length > 2 ? `settings (${set.length} set)` : `settings${set.length ? `: ${set.join(", ")}` : ""}`;
}

$("ask").addEventListener("submit", async e => {
  e.preventDefault();
  if (running) return running.abort();
  if (reading) {  // files chosen before Enter belong to the question; it is not sent without one that cannot be read
    while (reading) await reading;
    if (running || $("pictures-fault").textContent) return;
  }
  const text = $("text").value.trim();
  if (text || attached.length) submit(text);
});
$("text").addEventListener("keydown", e => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing && !running) { e.preventDefault(); $("ask").requestSubmit(); }
});
document.addEventListener("keydown", e => {
  if (e.key !== "Escape" || e.isComposing) return;
  if (running) running.abort();
  else if (!$("panel").hidden) { opened(false); $("open").focus(); }
});
window.addEventListener("storage", e => { if (e.key === "perilune.chats") changed(); });
watchPictures();
$("text").dir = "auto";
$("new").addEventListener("click", () => begin(fresh()));
$("open").addEventListener("click", () => opened($("panel").hidden));
$("think").addEventListener("change", recommend);
$("recommended").addEventListener("click", () => { for (const name of SAMPLING) $(name).value = ""; remember(); });
$("forget").addEventListener("click", () => { store("chats", []); forget(true); });
$("panel").addEventListener("change", remember);
$("key").addEventListener("change", () => {
  try { sessionStorage.setItem("perilune.key", $("key").value); } catch { /* forbidden: kept by the field alone */ }
  models();
});
try { $("key").value = sessionStorage.getItem("perilune.key") ?? ""; } catch { /* forbidden */ }
for (const [name, value] of Object.entries(stored("settings", {}))) {
  if (KEPT.includes(name) && typeof value === "string") $(name).value = value;
}
$("tool_choice").value ||= "auto";
marked();
listed();
models();
