// What Baton itself costs above the adapter, over a fake that weighs nothing: heap allocations, of
// which there are none, and processor time, which is printed beside its budget.
#include "tests/count_allocations.h"
#include "tests/std.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

constexpr size_t kPage = 4096;
constexpr double kBudget = 250;  // ns of user time per page of 4 KiB

double user_ns() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec) * 1e9 +
         static_cast<double>(usage.ru_utime.tv_usec) * 1e3;
}

class Cost : public testing::Test {
 protected:
  Cost() {
    pair_.connect();
    EXPECT_TRUE(pair_.run(pair_.request(Op::kWrite, 100)).ok());  // the region is known now
    EXPECT_TRUE(pair_.run(pair_.request(Op::kRead, 100)).ok());
    pair_.steps(100);
    pair_.fake->become_weightless();
    for (std::vector<uint32_t>* pages : {&here_, &there_}) {
      pages->resize(VerbsPair::kBytes / kPage / 2);
      std::iota(pages->begin(), pages->end(), 0);
      std::shuffle(pages->begin(), pages->end(), random_);
    }
  }
  TransferRequest paged(Op op) const {
    TransferRequest r = pair_.request(op);
    r.local_layout = Layout::paged(0, here_, kPage, kPage);
    r.remote_layout = Layout::paged(0, there_, kPage, kPage);
    return r;
  }
  // From submit() to the end of `count` transfers, `window` at a time; allocations in `made`.
  double ns_each(const TransferRequest& request, int count, size_t window, uint64_t& made) {
    Worker& worker = *pair_.a.worker;
    TransferRequest r = request;
    r.detached = true;
    size_t open = 0;
    r.context = &open;
    r.on_end = [](void* context, TransferId, const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      --*static_cast<size_t*>(context);
    };
    const uint64_t before = allocations.load();
    const double start = user_ns();
    for (int sent = 0; sent < count || open > 0;) {
      while (sent < count && open < window) {
        if (!worker.submit(r).ok()) break;
        ++open;
        ++sent;
      }
      worker.progress();
    }
    const double took = user_ns() - start;
    made = allocations.load() - before;
    return took / count;
  }
  // From submit() to the doorbell, and to its return: the typical one of `count`, without what
  // reading the clock costs.
  struct Prompt {
    double doorbell;
    double back;
  };
  Prompt prompt_ns(const TransferRequest& request, int count) {
    using Clock = std::chrono::steady_clock;
    Worker& worker = *pair_.a.worker;
    TransferRequest r = request;
    r.detached = true;
    Clock::time_point rung;
    std::vector<Clock::duration> doorbell;
    std::vector<Clock::duration> back;
    std::vector<Clock::duration> clock;
    const auto typical = [](std::vector<Clock::duration>& all) {
      std::nth_element(all.begin(), all.begin() + static_cast<ptrdiff_t>(all.size() / 2),
                       all.end());
      return static_cast<double>(all[all.size() / 2].count());
    };
    FakeVerbs::note_doorbells(&rung);
    for (int i = 0; i < count; ++i) {
      const auto start = Clock::now();
      EXPECT_TRUE(worker.submit(r).ok());
      const auto end = Clock::now();
      doorbell.push_back(rung - start);
      back.push_back(end - start);
      while (worker.progress()) {
      }
      const auto before = Clock::now();
      clock.push_back(Clock::now() - before);
    }
    FakeVerbs::note_doorbells(nullptr);
    const double one = typical(clock);
    return {typical(doorbell) - one, typical(back) - 2 * one};
  }
  // Warm first: queues grow to what they need once.
  void expect_cheap(const char* what, const TransferRequest& request, int count, size_t window,
                    size_t pages) {
    uint64_t made = 0;
    ns_each(request, std::max(2, count / 10), window, made);
    const double ns = ns_each(request, count, window, made) / static_cast<double>(pages);
    EXPECT_EQ(made, 0u) << what << ": heap allocations in the steady state";
    std::printf("%-44s %6.0f ns", what, ns);
    if (pages > 1) std::printf(" (budget %.0f)%s", kBudget, ns > kBudget ? "  OVER" : "");
    std::printf("\n");
    RecordProperty(what, std::to_string(ns));
  }

  std::mt19937_64 random_{1};
  VerbsPair pair_{{.clock = nullptr}};
  std::vector<uint32_t> here_;
  std::vector<uint32_t> there_;
};

TEST_F(Cost, OnePage) {
  expect_cheap("4 KiB page of a scattered write", paged(Op::kWrite), 2000, 2, here_.size());
  expect_cheap("4 KiB page of a scattered read", paged(Op::kRead), 2000, 2, here_.size());
  TransferRequest gathered = paged(Op::kWrite);
  gathered.remote_layout = Layout::contiguous(0, here_.size() * kPage);
  expect_cheap("4 KiB page of a gathered write", gathered, 2000, 2, here_.size());
}

TEST_F(Cost, OneTransfer) {
  expect_cheap("write of 4 KiB, 64 under way", pair_.request(Op::kWrite, kPage), 500'000, 64, 1);
  expect_cheap("read of 4 KiB, 64 under way", pair_.request(Op::kRead, kPage), 500'000, 64, 1);
  expect_cheap("write of 8 bytes, alone", pair_.request(Op::kWrite, 8), 500'000, 1, 1);
  const Prompt ns = prompt_ns(pair_.request(Op::kWrite, 8), 200'000);
  std::printf("%-44s %6.0f ns (budget 60), back after %.0f\n",
              "submit() of 8 bytes, to its doorbell", ns.doorbell, ns.back);
  RecordProperty("doorbell", std::to_string(ns.doorbell));
}

}  // namespace
}  // namespace baton
