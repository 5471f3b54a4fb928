// More staged transfers at a time than a ring has room for, by far.
#include "tests/gpudirect/staged_pair.h"
#include "tests/test.h"

namespace baton {
namespace {

constexpr size_t kMany = 10'000;
constexpr size_t kEach = 66'000;  // a little more than what is urgent
constexpr size_t kPlaces = 120;

class StagedCrowds : public StagedPair {
 protected:
  StagedCrowds() { max_transfers_ = 1 << 15; }
  void submit_many() {
    std::string sent(kBytes, '\0');
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 31 % 251);
    gpu_->write(a_.at, sent);
    gpu_->write(b_.at, std::string(kBytes, 'o'));
    for (size_t i = 0; i < kMany; ++i) {
      auto id = a_.worker->submit(request(Op::kWrite, true, true, kEach, i % kPlaces * kEach));
      ASSERT_TRUE(id.ok()) << i << ": " << id.status();
      ids_.push_back(*id);
    }
    until([&] { return gpu_->copies() > 2; });
  }
  size_t ended_of_them() const {
    return static_cast<size_t>(std::count_if(
        ids_.begin(), ids_.end(), [&](TransferId id) { return ended(*a_.worker->state(id)); }));
  }

  std::vector<TransferId> ids_;
};

TEST_F(StagedCrowds, TenThousandWaitForRoomAndWhatIsUrgentPassesThem) {
  start();
  submit_many();
  ASSERT_TRUE(run(request(Op::kWrite, true, true, 4096, kPlaces * kEach)).ok());
  EXPECT_LT(ended_of_them(), kMany / 10);
  EXPECT_EQ(gpu_->read(b_.at + kPlaces * kEach, 4096), gpu_->read(a_.at + kPlaces * kEach, 4096));

  // Every second one is stopped; none can be given back before it has ended.
  size_t active = 0;
  for (size_t i = 0; i < kMany; i += 2) {
    active += absl::IsFailedPrecondition(a_.worker->release(ids_[i])) ? 1 : 0;
    a_.worker->cancel(ids_[i]).IgnoreError();
  }
  EXPECT_GT(active, kMany / 4);
  size_t stopped = 0;
  for (size_t i = 0; i < kMany; ++i) {
    if (!a_.worker->state(ids_[i]).ok()) continue;  // given back above: it had ended
    const absl::Status status = finish(ids_[i]);
    EXPECT_TRUE(status.ok() || (i % 2 == 0 && absl::IsCancelled(status))) << i << ": " << status;
    stopped += status.ok() ? 0 : 1;
  }
  EXPECT_GT(stopped, kMany / 4);
  EXPECT_EQ(gpu_->queued(), 0u);
  EXPECT_EQ(gpu_->read(b_.at + kEach, kEach), gpu_->read(a_.at + kEach, kEach));
  // All room is free again: this takes all of it.
  gpu_->write(a_.at, std::string(kBytes, 'n'));
  EXPECT_TRUE(run(request(Op::kWrite, true, true, kBytes)).ok());
  EXPECT_TRUE(gpu_->read(b_.at, kBytes) == std::string(kBytes, 'n'));
}

}  // namespace
}  // namespace baton
