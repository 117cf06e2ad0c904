// Pictures and videos of the question that is being written: attached, pasted or dropped, shown small, sent with it.

const READ = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];  // types that server and browsers read
const BEGINS = /,(iVBOR|\/9j\/|UklGR|R0lGO|Qk)/;  // their bytes in base64
const KEPT_URL = /^data:image\/(png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/=]*$/;
const MOST_PICTURES = 16;  // of one question
const SENT_BYTES = 4000000;  // of a file that is sent as it is; larger ones are made smaller
const SENT_SIDE = 4096, KEPT_SIDE = 512;  // pixels: what a model sees has at most 7,168 on a side and 3.2 million in all
const KEPT_CHARS = 100000;  // of a picture that the browser keeps as it was sent; of larger ones a small copy
const VIDEO_BYTES = 20000000;  // of a video, which is sent as it is and not kept: 27 MB of the 32 that a request may have
const MOST_SENT = 30000000;  // characters of all pictures and videos of a chat, which each of its requests has

let attached = [];  // {url: what is sent, kept: what the browser keeps, name}
let reading = null;  // a promise while files are being read, which may take a second

/** Why this model gets no pictures; empty where it does. */
function blind() {
  if (!model.id || model.capabilities?.input?.includes("image")) return "";
  return `${model.id} does not see pictures`;
}

function faulty(text) { $("pictures-fault").textContent = text; }

const bytesAsUrl = file => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/** The picture with its longer side at most `side`, on white where it is transparent, as JPEG. */
function shrunk(bitmap, side) {
  const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", {width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale))});
  const paper = canvas.getContext("2d");
  paper.fillStyle = "#fff";
  paper.fillRect(0, 0, canvas.width, canvas.height);
  paper.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

async function video(file) {
  if (model.id && !model.capabilities?.input?.includes("video")) throw new Error(`${model.id} does not see videos`);
  if (file.size > VIDEO_BYTES) throw new Error(`${file.name} has more than ${VIDEO_BYTES / 1e6} MB`);
  return {url: await bytesAsUrl(file), kept: "", name: file.name};
}

async function picture(file) {
  if (file.type.startsWith("video/")) return video(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot read it as a picture`);
  }
  let url = READ.includes(file.type) && file.size <= SENT_BYTES ? await bytesAsUrl(file) : "";
  if (!BEGINS.test(url)) url = shrunk(bitmap, SENT_SIDE);
  const kept = url.length <= KEPT_CHARS ? url : shrunk(bitmap, KEPT_SIDE);
  bitmap.close();
  return {url, kept, name: file.name};
}

/** Takes files for the question, after those of earlier calls. */
function attachFiles(files) {
  const mine = Promise.resolve(reading).then(() => readFiles(files)).finally(() => { if (reading === mine) reading = null; });
  return reading = mine;
}

/** Reads files; says beside the field what cannot be taken. */
async function readFiles(files) {
  faulty(blind());
  if (!files.length || blind()) return;
  const faults = [];
  for (const file of files) {
    if (attached.length >= MOST_PICTURES) {
      faults.push(`at most ${MOST_PICTURES} pictures go with one question`);
      break;
    }
    try {
      const one = await picture(file), all = [...chat.messages.flatMap(message => message.pictures ?? []), ...attached, one];
      if (all.reduce((chars, {url}) => chars + url.length, 0) > MOST_SENT) {
        throw new Error(`${file.name}: with it the pictures and videos of this chat would have more than ${MOST_SENT * 3 / 4e6} MB`);
      }
      attached.push(one);
    } catch (e) {
      faults.push(e.message);
    }
  }
  faulty(faults.join("; "));
  attachments();
  $("text").focus();
}

const isVideo = one => one.url.startsWith("data:video/");
const called = (one, i) => `${isVideo(one) ? "video" : "picture"} ${i + 1}: ${one.name}`;
const shownPicture = (one, i) => isVideo(one)
  ? make("video", {src: one.url, title: one.name, muted: true, controls: true, "aria-label": called(one, i)})
  : make("img", {src: one.url, alt: called(one, i)});

function attachments() {
  $("pictures").replaceChildren(...attached.map((one, i) => make("li", {}, shownPicture(one, i),
    make("button", {type: "button", "aria-label": `remove ${called(one, i)}`, onclick: () => {
      attached.splice(i, 1);
      attachments();
      say(`${one.name} is removed`);
      $("text").focus();
    }}, "×"))));
  const what = attached.some(isVideo) ? "file" : "picture";
  if (attached.length) say(`${attached.length} ${attached.length === 1 ? `${what} goes` : `${what}s go`} with the question`);
}

/** The pictures of the question, which are no longer attached. */
function taken() {
  const pictures = attached;
  attached = [];
  attachments();
  faulty("");
  return pictures;
}

/** What the server gets of a message. */
function content(message) {
  if (!message.pictures?.length) return message.content;
  const parts = message.pictures.map(one => isVideo(one) ? {type: "video_url", video_url: {url: one.url}}
    : {type: "image_url", image_url: {url: one.url}});
  return [...parts, ...(message.content ? [{type: "text", text: message.content}] : [])];
}

/** Pictures as the browser keeps them, and as they were stored: other programs of this origin may write there too. */
const keptPictures = pictures => pictures.map(one => ({url: one.kept, name: one.name}));
function storedPictures(pictures) {
  return (Array.isArray(pictures) ? pictures : []).slice(0, MOST_PICTURES)
    .filter(one => typeof one?.url === "string" && KEPT_URL.test(one.url) && typeof one.name === "string")
    .map(one => ({url: one.url, kept: one.url, name: one.name}));
}

/** The button as the model allows. */
function seeing() {
  $("attach").disabled = Boolean(blind());
  $("attach-why").textContent = blind() ? `; ${blind()}` : "; pictures can be pasted and dropped";
}

function watchPictures() {
  const carried = transfer => [...(transfer?.files ?? [])];
  const dragged = e => [...(e.dataTransfer?.types ?? [])].includes("Files");
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    attachFiles([...$("files").files]);
    $("files").value = "";  // the same file can be chosen again
  });
  $("text").addEventListener("paste", e => {
    const files = carried(e.clipboardData);
    if (!files.length || e.clipboardData.types.includes("text/plain")) return;  // a table is copied as text and picture
    e.preventDefault();
    attachFiles(files);
  });
  document.addEventListener("dragover", e => {
    if (!dragged(e)) return;
    e.preventDefault();
    $("ask").classList.add("drop");
  });
  document.addEventListener("dragleave", e => { if (!e.relatedTarget) $("ask").classList.remove("drop"); });
  document.addEventListener("drop", e => {
    $("ask").classList.remove("drop");
    if (!dragged(e)) return;
    e.preventDefault();  // else the browser would leave the page for the file
    attachFiles(carried(e.dataTransfer));
  });
}
