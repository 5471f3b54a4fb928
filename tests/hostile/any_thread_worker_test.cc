// Two threads do with one worker whatever its public header allows, at once and at random, while a
// third looks after its peer and others come and go; whoever calls drives the worker, or nobody but
// a ProgressThread. What ended well did happen, and whatever was begun ends; the thread sanitizer
// sees the rest. BATON_SEED chooses another program.
#include "tests/hostile/any_thread.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/test.h"
#include "tests/usable_provider.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton {
namespace {

using hostile::Dice;
using hostile::Pile;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr size_t kThreads = 2;
constexpr size_t kPages = 512;  // each thread's, and each of them is written once
constexpr size_t kPage = 5000;

uint8_t stamp(size_t thread, size_t page) {
  return static_cast<uint8_t>(1 + (page + thread) % 255);
}

class AnyThread : public OverEveryProvider<std::string> {
 protected:
  WorkerOptions options(const std::string& name) const {
    WorkerOptions out;
    out.name = name;
    out.providers = {provider()};
    out.key = *ClusterKey::from_bytes("a key of the tests of threads");
    out.max_transfers = 256;
    return out;
  }

  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    worker_ = *Worker::create(options("everybodys"));
    other_ = *Worker::create(options("other"));
    memory_.resize(kThreads * kPages * kPage);
    const auto region = other_->register_memory(memory_.data(), memory_.size()).value();
    remote_ = *other_->remote_region(region);
  }

  // Drives the other side, and says something now and then.
  void drive() {
    size_t rounds = 0;
    PeerId peer;
    while (!stop_) {
      if (driven() || !other_->progress()) std::this_thread::yield();
      Notification note;
      while (other_->next_notification(note)) {
      }
      while (const auto event = other_->next_peer_event()) {
        if (event->kind == PeerEvent::Kind::kUp) peer = event->peer;
      }
      if (++rounds % 64 == 0 && peer.generation != 0) {
        other_->notify_detached(peer, "still here").IgnoreError();
      }
    }
  }

  // What one thread has of its own.
  struct Mine {
    Mine(size_t which, uint64_t seed) : number(which), dice(seed) {}
    const size_t number;
    Dice dice;
    size_t pages = 0;  // written, or tried
    std::array<bool, kPages> landed{};
    PeerId peer;
  };

  void live(Mine& mine, size_t steps) {
    for (size_t step = 0; step < steps; ++step) {
      if (worker_->peer_state(mine.peer) == PeerState::kDown) meet(mine);
      act(mine);
    }
    // Of the ids that are left each is somebody's to end.
    while (const auto id = ids_.take(mine.dice)) {
      worker_->cancel(*id).IgnoreError();
      ended_well(*id);
    }
  }

  // Whether it did. That it ends at all is the worker's business, whatever the other threads do.
  bool ended_well(TransferId id) {
    const absl::Status how = worker_->wait(id, patient(std::chrono::seconds(60)));
    EXPECT_FALSE(absl::IsDeadlineExceeded(how)) << how;
    return how.ok();
  }

  void meet(Mine& mine) {
    const auto peer = worker_->connect(other_->address());
    ASSERT_TRUE(peer.ok()) << peer.status();
    mine.peer = *peer;
    peers_.add(*peer);
  }

  void act(Mine& mine) {
    Dice& dice = mine.dice;
    switch (dice.below(18)) {
      case 0:
      case 1:
        return write(mine);
      case 2:
        return read(mine);
      case 3:
        if (const auto id = worker_->notify(mine.peer, std::string(dice.below(300), 'n'));
            id.ok()) {
          ids_.add(*id);
        }
        return;
      case 4:
        return worker_->notify_detached(mine.peer, "nobody waits for this").IgnoreError();
      case 5:
        if (const auto id = ids_.look(dice)) worker_->cancel(*id).IgnoreError();
        return;
      case 6:
        if (const auto id = ids_.look(dice)) {
          worker_->status(*id).IgnoreError();
          worker_->state(*id).status().IgnoreError();
        }
        return;
      case 7:  // two may wait for one, and one of them has it
        if (const auto id = ids_.look(dice)) {
          worker_->wait(*id, microseconds(dice.below(500))).IgnoreError();
        }
        return;
      case 8:
        if (const auto id = ids_.take(dice)) {
          if (absl::IsFailedPrecondition(worker_->release(*id))) ids_.add(*id);
        }
        return;
      case 9: {
        Notification note;
        while (worker_->next_notification(note)) {
        }
        return;
      }
      case 10:
        while (worker_->next_peer_event()) {
        }
        return;
      case 11: {
        const auto counter = worker_->allocate_counter();
        if (!counter.ok()) return;
        EXPECT_EQ(worker_->counter_value(*counter), 0u);
        worker_->remote_counter(*counter);
        EXPECT_TRUE(worker_->free_counter(*counter).ok());
        return;
      }
      case 12:
        worker_->stats();
        worker_->next_timer();
        worker_->arm();
        return;
      case 13:
        if (const auto peer = peers_.look(dice)) {
          worker_->explain(*peer);
          worker_->peer_status(*peer).IgnoreError();
          worker_->view(*peer, remote_).status().IgnoreError();
        }
        return;
      case 14:
        if (!dice.one_in(8)) return;
        if (const auto peer = peers_.take(dice)) {
          worker_->disconnect(*peer, milliseconds(dice.below(20))).IgnoreError();
        }
        return;
      case 15:
        if (dice.one_in(8)) visit(mine);
        return;
      case 16:
        worker_->wait_until([] { return false; }, microseconds(dice.below(200))).IgnoreError();
        return;
      default:
        if (!driven()) worker_->progress();
    }
  }

  // Memory that is registered for one transfer, and taken back as soon as may be.
  void write(Mine& mine) {
    if (mine.pages == kPages) return;
    const size_t page = mine.pages++;
    std::vector<uint8_t> bytes(kPage, stamp(mine.number, page));
    const auto region = worker_->register_memory(bytes.data(), bytes.size()).value();
    const auto id = worker_->submit(
        {.op = Op::kWrite,
         .peer = mine.peer,
         .local = region,
         .local_layout = Layout::contiguous(0, kPage),
         .remote = remote_,
         .remote_layout = Layout::contiguous((mine.number * kPages + page) * kPage, kPage),
         .notify = "a page"});
    if (id.ok()) {
      if (mine.dice.one_in(4)) worker_->cancel(*id).IgnoreError();
      if (mine.dice.one_in(4)) worker_->deregister_memory(region).IgnoreError();
      mine.landed[page] = ended_well(*id);
      EXPECT_TRUE(absl::IsNotFound(worker_->state(*id).status()));
    }
    const absl::Status gone = worker_->deregister_memory(region);
    EXPECT_TRUE(gone.ok() || absl::IsNotFound(gone)) << gone;
  }

  void read(Mine& mine) {
    std::vector<uint8_t> bytes(kPage);
    const auto region =
        worker_->register_memory(bytes.data(), bytes.size(), Access::kLocal).value();
    const size_t page = mine.dice.below(kPages);
    const size_t at = (mine.number * kPages + page) * kPage;
    const auto id = worker_->submit({.op = Op::kRead,
                                     .peer = mine.peer,
                                     .local = region,
                                     .local_layout = Layout::contiguous(0, kPage),
                                     .remote = remote_,
                                     .remote_layout = Layout::contiguous(at, kPage)});
    if (id.ok() && ended_well(*id) && mine.landed[page]) {
      EXPECT_EQ(bytes, std::vector<uint8_t>(kPage, stamp(mine.number, page)));
    }
    EXPECT_TRUE(worker_->deregister_memory(region).ok());
  }

  // Somebody comes, says a word, and goes, with a goodbye or in the middle of it.
  void visit(Mine& mine) {
    const auto guest = Worker::create(options("guest")).value();
    const auto host = guest->connect(worker_->address()).value();
    const auto id = guest->notify(host, "hello");
    for (uint64_t round = mine.dice.below(60); round > 0; --round) {
      guest->progress();
      if (!driven()) worker_->progress();
    }
  }

  bool driven() const { return thread_ != nullptr; }
  void run();

  std::unique_ptr<Worker> worker_, other_;
  std::unique_ptr<ProgressThread> thread_, other_thread_;  // or null, both
  std::vector<uint8_t> memory_;
  RemoteRegion remote_;
  std::atomic<bool> stop_{false};
  Pile<TransferId> ids_;
  Pile<PeerId> peers_;
};

void AnyThread::run() {
  const uint64_t seed = number_of("BATON_SEED", 1);
  SCOPED_TRACE("BATON_SEED=" + std::to_string(seed));
  const auto steps = static_cast<size_t>(rounds_of(2000, 500));
  std::thread driver([&] { drive(); });
  std::vector<std::unique_ptr<Mine>> all;
  std::vector<std::thread> threads;
  for (size_t number = 0; number < kThreads; ++number) {
    all.push_back(std::make_unique<Mine>(number, seed * 1000 + number));
    threads.emplace_back([this, steps, mine = all.back().get()] { live(*mine, steps); });
  }
  for (std::thread& thread : threads) thread.join();
  // What nobody waits for ends too.
  EXPECT_TRUE(worker_
                  ->wait_until([&] { return worker_->stats().open_transfers == 0; },
                               patient(std::chrono::seconds(60)))
                  .ok());
  stop_ = true;
  driver.join();
  thread_ = nullptr;
  other_thread_ = nullptr;
  worker_.reset();  // and with it all that could still move
  other_.reset();
  size_t landed = 0;
  for (const auto& mine : all) {
    for (size_t page = 0; page < kPages; ++page) {
      const uint8_t* const at = &memory_[(mine->number * kPages + page) * kPage];
      if (mine->landed[page]) {
        ++landed;
        EXPECT_EQ(std::vector<uint8_t>(at, at + kPage),
                  std::vector<uint8_t>(kPage, stamp(mine->number, page)));
      } else if (page >= mine->pages) {
        EXPECT_EQ(std::vector<uint8_t>(at, at + kPage), std::vector<uint8_t>(kPage));
      }
    }
  }
  EXPECT_GT(landed, 0u);
}

// Promise(agents): Any thread may call anything at any time | one lock per agent and per transfer,
//   not held while the worker waits
TEST_P(AnyThread, MayDoAnythingWithAWorker) { run(); }

// Nobody else wakes it from a sleep that it should not have begun.
TEST_P(AnyThread, MayDoAnythingWithAWorkerThatAThreadDrives) {
  thread_ = std::make_unique<ProgressThread>(*worker_);
  other_thread_ = std::make_unique<ProgressThread>(*other_);
  run();
}

INSTANTIATE_TEST_SUITE_P(Providers, AnyThread, testing::Values("shm", "tcp"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton
