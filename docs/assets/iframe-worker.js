// Browsers start no worker from file://. There search runs in a hidden frame instead, so the site works from disk.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const worker = frame.contentWindow;
      worker.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = worker.document.createElement("script");
        script.onload = () => resolve(worker);
        script.src = url;
        worker.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then((worker) => worker.dispatchEvent(new worker.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
