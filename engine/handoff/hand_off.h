// KV that is handed over by the name of a transfer, between engines of any make: what
// kv_transfer_params of a request ask for, over a Baton agent by the messages of vLLM's connector
// baton.vllm. docs/vllm.md is the manual.
//
// Prefill: a request with Request::hand_over is open()ed; after each layer of each of its steps the
// engine says how many of its tokens are computed; when it ends, its blocks are held until
// released() names it. Decode: the prompt of a request with Request::remote_prefill is a load of
// KvSource, whose KvLoad::transfer says where it is.
//
// Threads: one engine thread calls everything but params_of(); what is behind it has one of its
// own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton::engine::handoff {

struct HandOffOptions {
  std::string name;                // unique among engines that meet; its agent is name/0
  std::string host = "127.0.0.1";  // where others reach it
  uint16_t port = 0;               // what it listens on; 0: any
  // Identifies the checkpoint, equal at engines that have the same: checkpoint_digest(), or a name.
  std::string model;
  std::string fingerprint;  // of the arithmetic too: Model::fingerprint()
  // How long blocks stay that no engine asks for.
  Time lease = patient(std::chrono::seconds(60));
  size_t staging_bytes = size_t{256} << 20;
  // Key, providers and settings; its name and listener are made of what is above.
  WorkerOptions worker;
  const Clock* clock = nullptr;  // default: Clock::steady()
  bool start_thread = true;      // false: nothing moves but by turn(), for tests
};

class HandOff : public kvtransfer::KvSource {
 public:
  // InvalidArgument: no name or no model. Otherwise what Agent::create() and Staging::make() say.
  static absl::StatusOr<std::unique_ptr<HandOff>> create(HandOffOptions options);

  // The engine's cache, before all else...
  virtual absl::Status use_cache(const KvCache& cache) = 0;
  // ... and after all else: nothing touches it then, loads have failed, what was held is
  // released().
  virtual void close() = 0;
  // Readable when loads got on or blocks are free again: wait for it beside other descriptors, then
  // call progress().
  virtual int event_fd() const = 0;
  // Statistics of the worker that moves the bytes. Any thread, until close().
  virtual WorkerStats stats() const = 0;
  // Host and port, as decode has to be told.
  virtual std::string address() const = 0;
  // Hands out what came and moves everything on. Whether anything is under way. Of the thread that
  // serves, or in its place.
  virtual bool turn() = 0;

  // --- prefill -----------------------------------------------------------------------------------
  // A request of `tokens` tokens of prompt whose KV is for another engine. Its number here; 0:
  // another request has this name, so that for a lease neither's is handed over.
  virtual uint64_t open(absl::string_view transfer, size_t tokens) = 0;
  // `layer` of the request's first `tokens` tokens is computed; they lie in `blocks`, and stay as
  // they are until one of the next four calls.
  virtual void computed(uint64_t send, uint32_t layer, size_t tokens,
                        absl::Span<const uint32_t> blocks) = 0;
  // The engine takes the blocks away and will compute the request again. Nothing reads them when
  // this returns.
  virtual void restart(uint64_t send) = 0;
  // The request has ended; its blocks stay as they are until released() names it.
  virtual void hold(uint64_t send) = 0;
  // It has ended otherwise: nothing more is handed over. Nothing reads its blocks when this
  // returns.
  virtual void drop(uint64_t send) = 0;
  // Held requests whose blocks became free since the last call.
  virtual std::vector<uint64_t> released() = 0;
  // What decode has to be told, for a transfer of this name. Of any thread.
  virtual kvtransfer::KvTransfer params_of(absl::string_view transfer) const = 0;

  // --- decode ------------------------------------------------------------------------------------
  // The KV is not wanted: prefill may have its blocks back.
  virtual void decline(const kvtransfer::KvTransfer& from) = 0;
};

}  // namespace baton::engine::handoff
