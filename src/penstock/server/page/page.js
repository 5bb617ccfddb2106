"use strict";
// The page of `penstock serve`: no library, no build, nothing from elsewhere.

const at = (id) => document.getElementById(id);
const state = { messages: [], asked: null, reading: new Map(), chosen: "" };

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

function duration(ms) {
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const said = await answer.json().catch(() => null);
    if (answer.status === 401) at("access").open = true;
    throw new Error(said?.error?.message ?? `the server said ${answer.status}`);
  }
  return answer;
}

// Server-sent events of a response; comments (keep-alive) are passed over.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const said = JSON.parse(line.slice(6));
        if (said.error?.message) throw new Error(said.error.message);
        yield said;
      }
    }
  }
}

// Documents -------------------------------------------------------------------------------------

function choice(id, name, about) {
  const item = document.createElement("li");
  const radio = document.createElement("input");
  Object.assign(radio, { type: "radio", name: "document", id, value: name });
  radio.checked = state.chosen === name;
  radio.addEventListener("change", () => { state.chosen = name; });
  const label = document.createElement("label");
  label.htmlFor = id;
  label.textContent = about;
  item.append(radio, label);
  return item;
}

function drawDocuments(found) {
  const focused = document.activeElement?.id;
  if (!found.some((each) => each.id === state.chosen && each.status === "ready")) state.chosen = "";
  const items = [choice("document-none", "", "no document")];
  found.forEach((each, number) => {
    const item = choice(`document-${number}`, each.id, each.title || each.id);
    const remove = document.createElement("button");
    remove.type = "button";
    remove.id = `remove-${number}`;
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${each.title || each.id}`);
    remove.addEventListener("click", () => removeDocument(each));
    const about = document.createElement("small");
    item.append(remove);
    if (each.status === "ready") {
      about.textContent = `${each.tokens?.toLocaleString() ?? "?"} tokens, ${size(each.bytes)} on disk`;
    } else {
      item.querySelector("input").disabled = true;
      about.textContent = each.error ?? told(each);
      if (each.error) about.className = "bad";
      if (each.progress && !each.error) {
        const bar = document.createElement("progress");
        bar.max = each.progress.total || 1;
        if (each.progress.total) bar.value = each.progress.processed;
        bar.setAttribute("aria-label", `Reading ${each.title || each.id}`);
        item.append(bar);
      }
    }
    item.append(about);
    items.push(item);
  });
  at("list").replaceChildren(...items);
  if (focused) at(focused)?.focus();
}

function told(each) {
  const { processed, total, eta_ms: eta } = each.progress ?? {};
  if (!total) return each.status;
  const share = `${processed.toLocaleString()} of ${total.toLocaleString()} tokens`;
  return eta === null ? `${each.status}, ${share}` : `${each.status}, ${share}, ${duration(eta)} left`;
}

let looking = null;

async function listDocuments() {
  clearTimeout(looking);
  looking = null;
  try {
    const { data } = await (await request("v1/documents")).json();
    drawDocuments(data);
    const busy = data.some((each) => ["waiting", "reading", "storing"].includes(each.status));
    if (busy) looking = setTimeout(listDocuments, 500);
  } catch (error) {
    at("list").replaceChildren(choice("document-none", "", "no document"));
    say(error.message, true);
  }
}

async function removeDocument(each) {
  if (each.status === "ready" && !confirm(`Delete ${each.title || each.id}?`)) return;
  try {
    await request(`v1/documents/${encodeURIComponent(each.id)}`, { method: "DELETE" });
  } catch (error) {
    say(error.message, true);
  }
  await listDocuments();
}

function nameOf(file) {
  const plain = file.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/-+/g, "-");
  return plain.replace(/^[^A-Za-z0-9]+|-+$/g, "").slice(0, 60) || "document";
}

async function addFile(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    say(`${file.name} is not a text`, true);
    return;
  }
  const name = nameOf(file.name);
  const body = { name, title: file.name, text, stream: true };
  try {
    const answer = await request("v1/documents", { method: "POST", body: JSON.stringify(body) });
    say(`Reading ${file.name}. You can leave this page meanwhile.`);
    for await (const news of events(answer)) {
      if (news.status === "ready") {
        state.chosen = name;
        say(`${file.name} can be asked now.`);
      }
      if (!looking) await listDocuments();
    }
  } catch (error) {
    say(error.message, true);
  }
  await listDocuments();
}

// Chat ------------------------------------------------------------------------------------------

function bubble(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const who = document.createElement("b");
  who.textContent = role === "user" ? "You" : "Model";
  const thought = document.createElement("span");
  thought.className = "thought";
  const body = document.createElement("span");
  body.textContent = text;
  item.append(who, thought, body);
  at("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return { thought, body };
}

function remember() {
  sessionStorage.setItem("penstock-chat", JSON.stringify(state.messages));
  sessionStorage.setItem("penstock-document", state.chosen);
}

function drawAnswer(said, shown, first) {
  if (said.prompt_progress) {
    const { processed, total, cache, time_ms: took } = said.prompt_progress;
    const rest = processed > cache ? took / (processed - cache) * (total - processed) : null;
    say(`Reading ${processed.toLocaleString()} of ${total.toLocaleString()} tokens` +
        (rest ? `, ${duration(rest)} left` : ""));
  }
  const delta = said.choices?.[0]?.delta ?? {};
  if (delta.reasoning_content) shown.thought.textContent += delta.reasoning_content;
  if (delta.content) {
    if (first) say("Answering");
    shown.body.textContent += delta.content;
  }
  if (said.timings) drawFigures(said);
}

async function ask(question) {
  state.messages.push({ role: "user", content: question });
  bubble("user", question);
  const shown = bubble("assistant", "");
  state.asked = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  say("Waiting");
  let over = false;
  const body = {
    messages: state.messages, stream: true, return_progress: true, return_stats: true,
    // A question about a text has an answer there: the most probable words.
    ...(state.chosen ? { document: state.chosen, temperature: 0 } : {}),
  };
  try {
    const options = { method: "POST", body: JSON.stringify(body), signal: state.asked.signal };
    for await (const said of events(await request("v1/chat/completions", options))) {
      drawAnswer(said, shown, shown.body.textContent === "");
    }
    say(shown.body.textContent ? "Done" : "Done: the model said nothing");
    over = true;
  } catch (error) {
    if (error.name === "AbortError") say("Stopped");
    else say(error.message, true);
  }
  if (over || shown.body.textContent) {
    state.messages.push({ role: "assistant", content: shown.body.textContent });
  } else {
    state.messages.pop();
  }
  remember();
  state.asked = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  at("question").focus();
}

// Figures ---------------------------------------------------------------------------------------

function drawFigures({ timings, penstock }) {
  at("none").hidden = true;
  at("facts").hidden = false;
  at("prompt").textContent =
    `${timings.prompt_n.toLocaleString()} read, ${timings.cache_n.toLocaleString()} stored`;
  at("speed").textContent = `${duration(timings.queue_ms + timings.prompt_ms)}, ` +
    `${timings.predicted_per_second.toFixed(1)} a second`;
  if (!penstock) return;
  const full = penstock.full_cache_bytes;
  const share = full ? penstock.cache_peak_bytes / full : 0;
  at("memory").textContent = `${size(penstock.cache_peak_bytes)}, the full cache takes ${size(full)}`;
  at("memory-bar").value = Math.min(1, share);
  at("reads").textContent = size(penstock.decode_read_bytes / Math.max(1, penstock.decode_tokens));
  at("hits").textContent = penstock.units_wanted
    ? `${(100 * penstock.units_hit / penstock.units_wanted).toFixed(0)} % of ` +
      `${penstock.units_wanted.toLocaleString()} units`
    : "everything: nothing had to be read";
  at("stall").textContent = duration(1000 * penstock.decode_stall_s);
  drawStrip(penstock.attended);
}

function drawStrip(attended) {
  at("strip-box").hidden = !attended?.length;
  if (!attended?.length) return;
  const most = Math.max(...attended) || 1;
  at("strip").replaceChildren(...attended.map((share) => {
    const cell = document.createElement("i");
    cell.style.opacity = (share / most).toFixed(3);
    return cell;
  }));
  const isAll = Math.min(...attended) > 0.99;
  at("strip-title").textContent = isAll ? "The answer looked at all of the text"
    : "Where the answer looked, from the beginning of the text to its end";
  const best = attended.indexOf(Math.max(...attended));
  const place = Math.round(100 * (best + 0.5) / attended.length);
  at("strip").setAttribute("aria-label", isAll ? "All of the text"
    : `The answer looked most at what stands ${place} % into the text`);
}

// The page --------------------------------------------------------------------------------------

async function start() {
  at("key").value = sessionStorage.getItem("penstock-key") ?? "";
  state.messages = JSON.parse(sessionStorage.getItem("penstock-chat") ?? "[]");
  state.chosen = sessionStorage.getItem("penstock-document") ?? "";
  for (const { role, content } of state.messages) bubble(role, content);
  try {
    const { data: [model] } = await (await request("v1/models")).json();
    at("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString()} tokens at most`;
  } catch (error) {
    say(error.message, true);
    return;
  }
  await listDocuments();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || state.asked) return;
  at("question").value = "";
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => state.asked?.abort());
at("anew").addEventListener("click", () => {
  state.asked?.abort();
  state.messages = [];
  at("messages").replaceChildren();
  remember();
  say("");
});
at("key").addEventListener("change", () => {
  sessionStorage.setItem("penstock-key", at("key").value);
  say("");
  start();
});
at("file").addEventListener("change", () => {
  for (const file of at("file").files) addFile(file);
  at("file").value = "";
});
for (const kind of ["dragover", "dragenter"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", () => at("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  for (const file of event.dataTransfer.files) addFile(file);
});
start();
