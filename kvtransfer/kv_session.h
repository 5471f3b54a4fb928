// KvSession: KV of requests that goes from the engine that computes a prompt (prefill) to the one
// that continues it (decode), by the name of a transfer. Prefill offers and decode reads, or decode
// names blocks and prefill writes them; a lease bounds what either waits for.
//
//   decode                                        prefill
//                                                 open("t1", tokens)
//   start_load({.transfer = {"t1", ...}})
//                           --- want -->
//                           <-- layout, alive --  for each chunk, for each layer:
//                           <-- ready ----------    computed(send, layer, tokens, blocks)
//   layers_loaded(id) grows --- reads -->         hold(send)
//   end_load(id)            --- done -->          released(): the blocks are free again
//
// With KvOrder::push prefill writes instead, as it computes, and says when all is written. Where
// prefill has not heard of the request otherwise, the want asks it to compute the prompt
// (KvOrder::tokens; next_asked()).
//
// Either may be first. A name is one request's: two that have it get neither's KV. Each want renews
// the lease; what no reader asks for is released when the lease is over. A prefill that says
// nothing for a load's `silence` has failed, and so has a load that is older than its `timeout`:
// the engine computes the prompt then. A load is over when no byte of it moves any more: one that
// is written when prefill has said so, or is gone.
//
// A mover (kvtransfer/session/kv_mover.h) knows the caches' layouts: it lays blocks out for a
// reader, checks what was read by its checksums and puts it into place.
//
// Messages are JSON objects between agents. From decode: want (also a sign of life) and done. To
// decode: layout, ready, wrote, alive, over and gone. docs/vllm.md is the manual of what they are
// for.
//
// Threads: one engine thread makes all calls but params_of() and stats(); the session's own thread
// moves everything on. The engine's calls hold a lock for moments; restart(), drop()
// and open() may wait for a block that is being read.
//
// Errors: those of KvSource. InvalidArgument: a load without KvLoad::transfer, or with values out
// of range. AlreadyExists: its id is in use. FailedPrecondition: the session has no mover yet.
// Unavailable: the session is closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/kv_plan.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

namespace session {
class KvMover;
}  // namespace session

// Which worker of its engine this is: number `rank` of `ranks` in a pipeline's `stage`, of a model
// with `heads` KV heads (1 where all ranks hold the same).
struct KvWorker {
  uint32_t rank = 0, ranks = 1, heads = 1, stage = 0;
};

struct KvSessionOptions {
  // Takes its place, and outlives the session's close(): with serve_metadata, named as said below.
  // Its messages are the session's.
  Agent* agent = nullptr;
  std::shared_ptr<Agent> own_agent;  // instead of that: it ends with the session
  KvWorker shard;
  std::string name;  // unique among engines that meet; its agents are name/0, name/1 ...
  std::string host = "127.0.0.1";  // where others reach it
  uint16_t port = 0;               // what it listens on; 0: any
  // How long blocks stay that no engine asks for.
  Time lease = patient(std::chrono::seconds(60));
  // The longest that a reader who asks for a lease (KvOrder::lease) gets.
  Time max_lease = patient(std::chrono::seconds(60));
  bool may_be_read = true;  // false: those who ask without push are refused
  // Key, providers, settings and listen_host; its name and port are made of what is above.
  WorkerOptions worker;
  const Clock* clock = nullptr;  // default: Clock::steady()
  bool start_thread = true;      // false: nothing moves but by turn(), for tests
};

// Blocks of one group of layers: blocks[i] is number first_block + i of the sequence, and `tokens`
// those that are wanted of them.
struct KvRun {
  uint64_t first_block = 0;
  std::vector<uint32_t> blocks;
  KvTokens tokens;
};

// What decode wants of a transfer: of each group of layers a run; none: nothing, so that prefill
// may have its blocks back.
struct KvOrder {
  KvRequestId id = 0;  // of no load that is open
  KvTransfer from{};
  std::vector<KvRun> runs{};
  Time timeout{}, silence{};  // as those of KvLoad
  bool push = false;          // prefill writes the blocks, instead of being read
  // Prefill is asked to compute these, from the start of the sequence; those before first_token are
  // here already. Empty: it hears of the request otherwise.
  std::vector<int32_t> tokens{};
  uint32_t first_token = 0;
  uint32_t loads = 0;    // that read one worker of prefill; 0: as many as KvWorker::ranks says
  Time lease{};          // for how long prefill keeps blocks without a sign of life; 0: its own
  std::string decode{};  // what prefill calls who asks (KvAsked::decode); "": the agent's name
};

// What a decode engine asks prefill to compute.
struct KvAsked {
  std::string transfer;  // to open()
  std::vector<int32_t> tokens;
  uint32_t first_token = 0;
  uint32_t loads = 0;       // KvOrder::loads
  KvRequestId request = 0;  // decode's number for it, for timelines
  std::string decode;       // its agent
};

// A load that is over: nothing of it moves any more.
struct KvLoaded {
  KvRequestId id = 0;
  absl::Status status;
  Time took{};     // since it was ordered
  Time reading{};  // the time of that in which blocks were read and checked
};

class KvSession : public KvSource {
 public:
  // Errors: those of Agent::create().
  static absl::StatusOr<std::unique_ptr<KvSession>> create(KvSessionOptions options);
  ~KvSession() override;

  // Before all else. FailedPrecondition: it has one.
  absl::Status use(std::unique_ptr<session::KvMover> mover);
  // After all else: nothing touches the cache then, loads have failed, what was held is released().
  void close();
  // The session's agent; null when the session is closed.
  Agent* agent();
  // Readable when loads got on or blocks are free again: wait for it beside other descriptors, then
  // call progress().
  int event_fd() const;
  // Statistics of the worker that moves the bytes. Any thread, until close().
  WorkerStats stats() const;
  KvConnectorStats session_stats();
  // Host and port, as decode has to be told.
  const std::string& address() const;
  // Hands out what came and moves everything on; true: anything is under way. Call it from the
  // thread that serves, or in its place (start_thread = false).
  bool turn();

  // --- prefill -----------------------------------------------------------------------------------
  // A request of `tokens` tokens of prompt whose KV is for another engine. Its number here; 0:
  // another request has this name, so that for a lease neither's is handed over.
  uint64_t open(absl::string_view transfer, size_t tokens);
  // `layer` of the request's first `tokens` tokens is computed; they lie in `blocks`, and stay as
  // they are until one of the next four calls.
  void computed(uint64_t send, uint32_t layer, size_t tokens, absl::Span<const uint32_t> blocks);
  // Where blocks are read as they lie: those from number `first_block` on are computed in a layer.
  // InvalidArgument: the cache has no such layer, or block.
  absl::Status save(uint64_t send, uint32_t layer, uint64_t first_block,
                    absl::Span<const uint32_t> blocks);
  // The engine takes the blocks away and will compute the request again. Nothing reads them when
  // this returns.
  void restart(uint64_t send);
  // The request has ended; its blocks stay as they are until released() names it.
  void hold(uint64_t send);
  // It has ended otherwise: nothing more is handed over. Nothing reads its blocks when this
  // returns.
  void drop(uint64_t send);
  // Likewise, but its readers hear why, and its blocks stay as they are until released() names it.
  void fail(uint64_t send, const absl::Status& why);
  // A request that decode wants to be computed and that was not open()ed: open it, or refuse it.
  std::optional<KvAsked> next_asked();
  // Its readers hear why.
  void refuse(absl::string_view transfer, const absl::Status& why);
  // False when all of its readers are gone, or want no more of it: stop computing it.
  bool is_wanted(uint64_t send);
  // So many readers come, and until `lease` from now.
  void expect(uint64_t send, uint32_t loads, Time lease);
  // For its readers, with the last of the blocks: the first token, sampling state. Before hold().
  void give(uint64_t send, std::string payload);
  // Held requests whose blocks became free since the last call.
  std::vector<uint64_t> released();
  std::optional<uint64_t> next_released();  // one of these
  // What decode has to be told for a transfer of this name. Any thread may call it.
  KvTransfer params_of(absl::string_view transfer) const;

  // --- decode: the calls of KvSource, and --------------------------------------------------------
  absl::Status start_load(KvLoad load) override;
  uint32_t layers_loaded(KvRequestId id) override;
  absl::Status load_status(KvRequestId id) override;
  bool is_exact(KvRequestId id) override;
  bool end_load(KvRequestId id) override;
  void progress() override;
  void wait(Time timeout, int fd) override;
  void decline(const KvTransfer& from) { load({.from = from}).IgnoreError(); }
  absl::Status load(KvOrder order);
  // One that is over, and is forgotten by this: instead of load_status() and end_load().
  std::optional<KvLoaded> next_loaded();
  // Moves its deadline to `timeout` from now. NotFound: there is no such load.
  absl::Status renew_load(KvRequestId id, Time timeout);
  // What prefill gave. Unavailable: not yet. NotFound: there is no such load.
  absl::StatusOr<std::string> payload(KvRequestId id);
  // Blocks of a load, of all its runs in their order, of which not all has come.
  std::vector<uint32_t> failed_blocks(KvRequestId id);

 protected:
  KvSession(KvSession&& other) noexcept;

 private:
  struct Inside;
  explicit KvSession(std::unique_ptr<Inside> inside);

  std::unique_ptr<Inside> inside_;
};

}  // namespace baton::kvtransfer
