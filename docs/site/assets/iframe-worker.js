// A browser starts no worker for a page that is opened from disk. There the search's worker runs in a
// hidden frame, which has what it asks of one: a place of its own, and messages both ways, as copies.
if (location.protocol === "file:") {
  window.Worker = class {
    onmessage = null
    onerror = null
    onmessageerror = null
    #frame = document.createElement("iframe")
    #ready

    constructor(url) {
      this.#frame.hidden = true
      document.documentElement.append(this.#frame)
      const inside = this.#frame.contentWindow
      inside.postMessage = data => this.onmessage?.({ data: structuredClone(data) })
      const script = inside.document.createElement("script")
      script.src = new URL(url, location)
      this.#ready = new Promise(loaded => (script.onload = loaded))
      script.onerror = event => this.onerror?.(event)
      inside.document.documentElement.append(script)
    }

    async postMessage(data) {
      const copy = structuredClone(data)
      await this.#ready
      this.#frame.contentWindow?.onmessage({ data: copy })
    }

    terminate() {
      this.#frame.remove()
    }
  }
}
