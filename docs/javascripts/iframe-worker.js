// Lets the site's search work when the pages are opened from a disk: browsers start no worker there, so its script runs
// in a hidden frame instead.
"use strict";
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    frame.title = "search";
    document.body.appendChild(frame);
    const inside = frame.contentWindow;
    this.inside = inside;
    inside.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
    this.ready = this.load(url);
  }
  load(url) {
    const page = this.inside.document;
    return new Promise((done, failed) => {
      const script = page.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = done;
      script.onerror = failed;
      page.body.appendChild(script);
    });
  }
  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
  }
  terminate() {
    this.inside.frameElement.remove();
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
