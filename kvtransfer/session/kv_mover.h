// What a session leaves to those who know how blocks lie. The session has names, leases, messages,
// and who is alive; a mover has layouts, checksums and memory.
//
// At prefill a Kept is one transfer's blocks, and an Outgoing what a reader sees of them: in place,
// or copied for it. At decode a Source is a prefill's cache, and an Incoming one load of it.
//
// Threads: all is called by the session's thread, but for keep() and what says "engine". Calls of a
// Kept, and those of an Outgoing that say "locked", are under the session's lock.
//
// Pushes: an Outgoing of a reader that wants to be written to begins its writes in next() and
// work(), as it would copy; each says {"kind": "wrote", "transfer", "parts"} when its bytes are
// there.
//
// What a peer says may make nlohmann::json throw: the session takes it for nonsense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/kv_session.h"

namespace baton::kvtransfer::session {

class KvMover {
 public:
  // A reader's cache.
  struct Reader {
    virtual ~Reader() = default;
  };
  // Rows are those of the layout that the reader is told of. Blocks are numbered as in the
  // sequence.
  class Outgoing {
   public:
    virtual ~Outgoing() = default;
    // Why it will never be ready, and the remedy.
    virtual absl::Status fits() const { return absl::OkStatus(); }
    // Takes room for all of it or for nothing: two that each had half would wait for each other.
    // False: there is none at present.
    virtual bool make_room() { return true; }
    // How many bytes there are to copy next; 0: what is computed is ready. Locked.
    virtual size_t next() { return 0; }
    // Copies them. Not locked: the engine leaves its blocks as they are meanwhile.
    virtual void work() {}
    // All of the prompt is copied: it needs the engine's blocks no more.
    virtual bool whole() const { return false; }
    virtual size_t rows() const = 0;
    // The number of a row's first block in the sequence. Locked, as the next three.
    virtual uint64_t first(size_t /*row*/) const { return 0; }
    // Blocks of a row that are ready, counted from that one.
    virtual size_t ready(size_t row) const = 0;
    // [block, checksum] of one of these, or [block, [checksum, ...]] of its pieces.
    virtual nlohmann::json block(size_t row, size_t number) const = 0;
    virtual size_t checksums(size_t /*row*/) const { return 1; }  // of a block
    // Blocks that its reader wants and that are not ready, where it says what it wants. Locked.
    virtual size_t missing() const { return 0; }
    // Where it is written to: the writes that work() has begun since the last call.
    struct Write {
      AgentTransferId transfer;
      uint32_t layer = 0;
    };
    virtual absl::StatusOr<std::vector<Write>> begun() {
      return absl::UnimplementedError("this cache is only read: load without push");
    }
  };
  class Kept {
   public:
    virtual ~Kept() = default;
    // See KvSession. Engine. False: these are other blocks than those of before.
    virtual bool computed(uint32_t layer, uint64_t first_block, size_t tokens,
                          absl::Span<const uint32_t> blocks) = 0;
    virtual void restart() = 0;
    // For a reader whose cache is like another's, what that one has. `there`: the engine still has
    // the blocks. `want`: its first of this transfer. Null: nothing can be shown.
    virtual std::shared_ptr<Outgoing> show(const std::shared_ptr<const Reader>& reader, bool there,
                                           const nlohmann::json& want) = 0;
  };
  struct Source {
    virtual ~Source() = default;
    std::vector<Descriptor> spans;  // the memory that is read
    MemoryKind kind = MemoryKind::kDram;
    uint32_t ranks = 1;  // of that prefill
  };
  struct Posted {
    AgentTransferId transfer;
    size_t from = 0;  // which source
  };
  class Incoming {
   public:
    virtual ~Incoming() = default;
    // Source number `from` sends this part of the heads, where its name does not say so.
    virtual void take_share(size_t /*from*/, const KvShare& /*share*/) {}
    // What the blocks of source number `from` are is known.
    virtual void join(size_t from, std::shared_ptr<const Source> source) = 0;
    // It says that these are ready: [[row, first number, [[block, checksum], ...]], ...]. A block
    // may be said again.
    virtual absl::Status ready(size_t from, const nlohmann::json& parts) = 0;
    // Posts reads of what is ready, as far as there is room.
    virtual absl::Status read(std::vector<Posted>* posted) = 0;
    // One of them has ended, and is released. Not `wanted`: what it brought is not looked at.
    virtual absl::Status landed(AgentTransferId read, bool wanted) = 0;
    // Its blocks were held until then at least: what was read by then, where no checksum tells, is
    // good. Called after each landed(), too.
    virtual void held(size_t /*from*/, Time /*until*/, Time /*now*/) {}
    // Something waits for that.
    virtual bool doubts(size_t /*from*/) const { return false; }
    // It has written these, as its Outgoing says.
    virtual absl::Status wrote(size_t /*from*/, const nlohmann::json& /*parts*/) {
      return absl::InternalError("prefill wrote what was to be read");
    }
    // How many layers are here, from the first.
    virtual uint32_t layers() const = 0;
    virtual uint64_t bytes(uint32_t /*layer*/) const { return 0; }  // of the load
    virtual bool complete() const = 0;
    // Blocks of the load, run after run, of which something is not here.
    virtual std::vector<uint32_t> missing() const { return {}; }
    // What is here is to the bit what this engine would have computed.
    virtual bool exact() const = 0;
  };

  virtual ~KvMover() = default;
  // How many layers the model has.
  virtual size_t layers() const = 0;

  // --- prefill
  // A reader's cache, by its want. An error: it cannot be served, and why.
  virtual absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                             const nlohmann::json& want) = 0;
  // What it is told of this cache.
  virtual nlohmann::json layout(const nlohmann::json& want,
                                const absl::StatusOr<std::shared_ptr<const Reader>>& reader) = 0;
  // Whether its blocks can become what this reader wants of a transfer. An error: why not.
  virtual absl::Status serves(const std::shared_ptr<const Reader>& /*reader*/,
                              const nlohmann::json& /*want*/) {
    return absl::OkStatus();
  }
  // A request's blocks, of so many tokens of prompt. Engine.
  virtual std::unique_ptr<Kept> keep(size_t tokens) = 0;
  // InvalidArgument: the cache has no such layer, or block. Engine.
  virtual absl::Status check(uint32_t /*layer*/, absl::Span<const uint32_t> /*blocks*/) const {
    return absl::OkStatus();
  }

  // --- decode
  // What a want says of this cache; and where it is to be written to, or says which tokens are
  // wanted.
  virtual nlohmann::json about() const = 0;
  virtual nlohmann::json about_blocks() const { return nlohmann::json::object(); }
  // What a load of KvSource's wants. InvalidArgument: it makes no sense. Engine.
  virtual absl::StatusOr<std::vector<KvRun>> runs_of(const KvLoad& /*load*/) const {
    return absl::UnimplementedError("this cache is loaded by KvSession::load()");
  }
  // A prefill's cache, by its layout. An error: it cannot be read, and why.
  virtual absl::StatusOr<std::shared_ptr<Source>> understand(const nlohmann::json& layout) = 0;
  // Its memory is known. `before`: what this prefill said until now, or null. Where the two are
  // alike that is returned, and loads of it go on.
  virtual absl::StatusOr<std::shared_ptr<Source>> reach(const std::string& prefill,
                                                        std::shared_ptr<Source> source,
                                                        const std::shared_ptr<Source>& before) = 0;
  // InvalidArgument: the runs are not of this cache's groups.
  virtual absl::StatusOr<std::unique_ptr<Incoming>> begin(std::vector<KvRun> runs, size_t sources,
                                                          KvRequestId id) = 0;
};

}  // namespace baton::kvtransfer::session
