// Memory that goes away under a transfer: that fails with the reason, and nothing else does.
#include "tests/conformance/harness.h"
#include "tests/transport/fading_memory.h"

namespace baton {
namespace {

using testing::HasSubstr;

constexpr size_t kPage = 4096;
constexpr size_t kMost = 1 << 20;

class Unmapped : public Conformance {
 protected:
  // A transfer of `bytes` between `lost` memory at `offset` and another place of the other side.
  TransferRequest move(Op op, bool far, const MemoryRegion& lost, size_t offset, size_t bytes) {
    TransferRequest out = request(op, a_, b_, 0, bytes);
    if (plain_) (far ? out.local_layout : out.remote_layout) = Layout::contiguous(0, bytes);
    (far ? out.remote_layout : out.local_layout) = Layout::contiguous(offset, bytes);
    const MemoryRegion& other = plain_ ? *plain_ : (far ? a_ : b_).block.region;
    out.local = far ? other : lost;
    out.remote = *b_.worker->remote_region(far ? lost : other);
    if (op == Op::kWrite) out.notify = "it is there";
    return out;
  }
  size_t announced() {
    Notification note;
    size_t count = 0;
    while (b_.worker->next_notification(note)) ++count;
    return count;
  }
  static void expect_gone(const absl::Status& status, size_t bytes) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << bytes << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no longer mapped"));
  }
  void lose(Op op, bool far, Fading how, bool pooled);

  std::optional<MemoryRegion> plain_;  // of the other side; none: its block, which is of a pool
};

void Unmapped::lose(Op op, bool far, Fading how, bool pooled) {
  SCOPED_TRACE(absl::StrCat(op == Op::kWrite ? "write" : "read", far ? ", far, " : ", near, ",
                            name_of(how), pooled ? ", pool" : ""));
  const bool works = how == Fading::kReadOnly && (op == Op::kWrite) != far;  // it is only read
  const FadingMemory memory(2 * kMost, how);
  std::vector<std::byte> plain(kMost);
  Worker& owner = *(far ? b_ : a_).worker;
  Worker& others = *(far ? a_ : b_).worker;
  std::byte* const other = pooled ? (far ? a_ : b_).data() : plain.data();
  plain_.reset();
  if (!pooled) plain_ = *others.register_memory(plain.data(), kMost);
  const auto region = owner.register_memory(memory.data, memory.size).value();
  fill(memory.data, kMost, 1);
  fill(other, kMost, 2);
  memory.fade();
  for (const size_t bytes : {size_t{1}, size_t{100}, kPage, 3 * kPage + 5, 15 * kPage, kMost}) {
    announced();
    for (const size_t offset : {kMost, kMost - bytes / 2}) {
      const absl::Status status = run(a_, move(op, far, region, offset, bytes));
      if (works) {
        EXPECT_TRUE(status.ok()) << bytes << ": " << status;
      } else {
        expect_gone(status, bytes);
      }
    }
    EXPECT_TRUE(works || announced() == 0) << "what did not land was announced";
    const absl::Status good = run(a_, move(op, far, region, 0, bytes));
    EXPECT_TRUE(good.ok()) << bytes << ": " << good;
    EXPECT_EQ(std::memcmp(memory.data, other, bytes), 0) << bytes;
  }
  const std::vector<uint32_t> pages = {12, 3, 1030, 1};  // of 1 KiB: one of them is gone
  TransferRequest scattered = move(op, far, region, 0, 4096);
  (far ? scattered.remote_layout : scattered.local_layout) = Layout::paged(0, pages, 1024, 1024);
  const absl::Status status = run(a_, scattered);
  if (!works) expect_gone(status, 4096);
  EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
  EXPECT_TRUE(owner.deregister_memory(region).ok());
  if (plain_) {
    EXPECT_TRUE(others.deregister_memory(*plain_).ok());
  }
}

// Promise(memory): Over tcp, memory that is unmapped under a transfer fails that transfer only |
//   the kernel reports `EFAULT`; the rest of the slice is drained
// Promise(memory): Over shm, unmapped memory fails the transfer, not the process | a handler of
//   SIGSEGV and SIGBUS ends our own copies (`BATON_CATCH_FAULTS=no`: none)
// Promise(memory): Over ucx, unmapped memory fails the transfer, not the process | a handler
//   of SIGSEGV and SIGBUS ends our own copies
TEST_P(Unmapped, FailsItsTransferAlone) {
  const std::string_view name = GetParam().name;
  for (const bool far : {false, true}) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      // It costs a connection (tests/tcp/unmapped_test.cc).
      if (name == "tcp" && op == Op::kWrite && !far) continue;
      for (const Fading how : {Fading::kUnmapped, Fading::kReadOnly, Fading::kTruncated}) {
        lose(op, far, how, true);
        if (name == "shm") lose(op, far, how, false);  // the kernel copies, without our handler
      }
    }
  }
}

std::vector<Variant> moved_by_the_cpu() {
  std::vector<Variant> out = all_variants();
  std::erase_if(out, [](const Variant& each) {
    const std::string_view provider = each.provider;
    return each.decorated || (provider != "tcp" && provider != "shm" && provider != "ucx");
  });
  return out;
}

INSTANTIATE_TEST_SUITE_P(Conformance, Unmapped, testing::ValuesIn(moved_by_the_cpu()),
                         [](const auto& variant) { return std::string(variant.param.name); });

}  // namespace
}  // namespace baton
