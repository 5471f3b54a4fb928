// The order of signals through the plugin's RMA functions, in virtual time, over a network that
// loses, repeats and overtakes: contexts and the strong flag, as NCCL gives them.
//
// BATON_SEEDS=470 is 10^6 signals; tests/seeds.h says which seeds run.
#include "plugins/nccl/rma.h"
#include "tests/communicator/windows_litmus.h"

namespace baton::nccl {
namespace {

class RmaLitmus final : public Litmus {
 public:
  using Litmus::Litmus;
  ~RmaLitmus() override {
    drive_for(std::chrono::milliseconds(20));
    for (void* context : contexts_) rma::destroy_context(context);
    rma_.clear();
  }

 private:
  void make_windows() override {
    Litmus::make_windows();
    sources_ = make(windows_[0]->bytes());
    for (size_t node = 0; node < kNodes; ++node) {
      rma_.push_back(std::make_unique<RmaComm>(comms_[node]));
      targets_.push_back(keep(node, windows_[node]));
      local_.push_back(keep(node, sources_[node]));
      ASSERT_EQ(rma::create_context(handle(node), kTags, &contexts_[node]), Result::kSuccess);
    }
  }
  void* handle(size_t node) const { return reinterpret_cast<void*>(rma_[node]->number()); }
  void* keep(size_t node, const std::shared_ptr<Window>& window) {
    auto memory = std::make_unique<RmaMemory>();
    memory->window = window;
    return rma_[node]->keep(std::move(memory));
  }

  absl::StatusOr<uint64_t> start(size_t node, int to, size_t tag, const void* data, size_t words,
                                 size_t offset, bool signals) override {
    const size_t bytes = words * sizeof(uint64_t);
    // Each target's words have a place of their own in the source's memory.
    const size_t place = offset - Litmus::place(node, 0, 0) * sizeof(uint64_t) +
                         Litmus::place(static_cast<size_t>(to), 0, 0) * sizeof(uint64_t);
    if (bytes > 0) std::memcpy(sources_[node]->data() + place, data, bytes);
    const RmaAccess access{.number = static_cast<int>(tag),
                           .local = local_[node],
                           .remote = targets_[node],
                           .local_offset = place,
                           .remote_offset = offset,
                           .size = bytes,
                           .rank = static_cast<uint32_t>(to),
                           .words = targets_[node],
                           .word_offset = word(node, tag) * sizeof(uint64_t),
                           .operation = kSignalInc,
                           .strong = kind_ == Signals::kWords,
                           .flags = pick(8) == 0 ? kAggregate : 0};
    void* request = nullptr;
    const Result result = signals ? rma::put_signal(contexts_[node], access, &request)
                                  : rma::put(contexts_[node], access, &request);
    if (result != Result::kSuccess) return absl::InternalError("a put was refused");
    return reinterpret_cast<uint64_t>(request);
  }
  std::optional<absl::Status> ended(size_t node, uint64_t name) override {
    int done = 0;
    const Result result = rma::test(handle(node), reinterpret_cast<void*>(name), &done);
    if (result != Result::kSuccess) return absl::InternalError("a request failed");
    if (done == 0) return std::nullopt;
    return absl::OkStatus();
  }

  std::vector<std::shared_ptr<Window>> sources_;
  std::vector<std::unique_ptr<RmaComm>> rma_;
  std::vector<void*> targets_, local_;
  std::array<void*, kNodes> contexts_{};
};

// Promise(nccl): A strong signal is never seen before a byte of an earlier put of its context |
//   random puts and signals through the RMA plugin's functions, over a network that loses, repeats
//   and overtakes, in virtual time; 10^6 of them by BATON_SEEDS=470
TEST(RmaLitmus, NoStrongSignalOvertakesAPut) {
  EXPECT_EQ(signals_of<RmaLitmus>(Signals::kWords, 3).early, 0u);
}

// Weak ones do, over the same network: the order above is the plugin's.
TEST(RmaLitmus, WeakSignalsOvertakePuts) {
  EXPECT_GT(signals_of<RmaLitmus>(Signals::kWeakWords, 3).early, 0u);
}

}  // namespace
}  // namespace baton::nccl
