// The fixture of the conformance suite: two workers in one process, connected by the provider under
// test, each with a pool and a block of memory that the other may read and write.
#pragma once

#include "tests/sanitized.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/pool.h"
#include "transport/timeline.h"
#include "transport/worker.h"

namespace baton {

// An environment that some providers of the suite need around their workers.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual void prepare(WorkerOptions& options) = 0;
  // After all workers are gone.
  virtual void check() = 0;
};
// Of the verbs provider over a fake of the verbs calls; null where it is not built.
std::unique_ptr<Surroundings> fake_verbs_surroundings();

// A fake of the CUDA driver, for blocks in memory of a device.
class Devices {
 public:
  virtual ~Devices() = default;
  struct Memory {
    void* address = nullptr;    // as the device has it: the host cannot follow it
    std::byte* view = nullptr;  // the same bytes, as the test sees them
  };
  virtual Memory allocate(size_t bytes) = 0;
  // After all workers are gone; frees what was allocated.
  virtual void check() = 0;
};
// How processes of one machine can map blocks on a device: by descriptors of virtual memory
// management, or by handles of cudaMalloc's memory.
enum class Ipc : uint8_t { kNone, kDescriptors, kHandles };
// Null in the suite that runs over memory of the host alone.
std::unique_ptr<Devices> fake_devices(bool dma_buf, Ipc ipc);

// What the suite runs over.
struct Variant {
  const char* name = "";
  const char* provider = "";
  std::vector<std::pair<std::string, std::string>> settings;
  bool decorated = false;    // shaped and traced
  bool slow = false;         // may be a device made of software, on a processor made of software
  bool near_device = false;  // the blocks of a
  bool far_device = false;   // and of b lie in memory of a device
  bool dma_buf = true;       // which adapters can be given
  Ipc ipc = Ipc::kNone;
};
std::ostream& operator<<(std::ostream& out, const Variant& variant);
std::vector<Variant> all_variants();

// One of the two workers.
struct Side {
  std::unique_ptr<Worker> worker;
  std::unique_ptr<MemoryPool> pool;
  PeerId peer;  // the other side
  Block block;
  RemoteRegion remote;  // of the pool slab that holds the block

  std::byte* data() const { return block.data; }
  // What is to be registered for the same bytes.
  void* address() const { return on_device != nullptr ? on_device : block.data; }
  void* on_device = nullptr;
  // A region offset of the block's byte `at`.
  size_t offset(size_t at) const { return block.offset + at; }
};

class Conformance : public testing::TestWithParam<Variant> {
 protected:
  static constexpr size_t kBlockBytes = 8 << 20;
  static inline const Time kPatience = until_gives_up();

  void SetUp() override;
  void TearDown() override;
  void start(size_t block_bytes = kBlockBytes);  // called by SetUp()
  void make_side(Side& side, const char* name, size_t node, size_t block_bytes);
  // Connects and waits for both ends; returns the id at either.
  std::pair<PeerId, PeerId> connect(Side& from, Side& to);
  WorkerOptions options(const char* name, size_t node);

  // Of something that is repeated `all` times: fewer where the variant, or this build, is slow.
  static int rounds(int all) {
    const int few = std::max(1, all / 5);
    return GetParam().slow ? few : rounds_of(all, few);
  }

  // Turns both workers until the fact holds.
  void until(const std::function<bool()>& fact, CallSite from = CallSite::here());
  std::string state() const;
  // Lets a little happen: some rounds of progress, or some virtual time.
  void nudge(size_t amount);
  // Drives until everything that was sent over any path before has come through.
  void settle();

  // Bytes [at, +bytes) of both blocks.
  TransferRequest request(Op op, const Side& from, const Side& to, size_t at, size_t bytes) const;
  TransferId submit(Side& side, const TransferRequest& request);
  bool ended(Side& side, TransferId id);
  // Submits, drives to the end, releases; how it ended.
  absl::Status run(Side& side, const TransferRequest& request);
  absl::Status finish(Side& side, TransferId id);

  std::optional<sim::SimFabric> fabric_;
  std::unique_ptr<Surroundings> surroundings_;
  std::unique_ptr<Devices> devices_;
  std::optional<Timeline> timeline_;
  std::string_view cluster_key_ = "a secret of the conformance suite";
  uint32_t max_transfers_ = 512;
  Side a_;
  Side b_;
  bool sim() const { return fabric_.has_value(); }
};

// Fills with bytes that depend on the position and the seed; never 0xcc or 0xdd.
void fill(std::byte* data, size_t bytes, uint64_t seed);
std::byte filled(uint64_t seed, size_t at);
bool holds(const std::byte* data, size_t bytes, std::byte value);
inline constexpr std::byte kPoison{0xcc};
inline constexpr std::byte kReused{0xdd};

// A random layout and, worked out without Layout's own code, where each of its bytes lies.
struct RandomBox {
  Layout layout;
  std::vector<std::vector<uint32_t>> pages;  // kept alive for the layout
  std::vector<size_t> offsets;
};
// `bytes` must have no prime factor above 7. No byte of the region occurs twice.
void make_box(RandomBox& out, std::mt19937_64& random, size_t bytes, size_t base, size_t limit);

}  // namespace baton
