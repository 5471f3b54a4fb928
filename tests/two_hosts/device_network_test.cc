// Memory of devices on two hosts, and what may happen to the network between them: chunks, the
// words about them and their answers are cut, stand still and go on; and one of the hosts goes
// between the landing of the bytes and the word of it.
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/two_hosts/two_workers.h"

namespace baton {
namespace {

using gpudirect::DevicePointer;
using gpudirect::kMiB;
using std::chrono::milliseconds;

constexpr size_t kBytes = kMiB / 2;

class DeviceNetwork : public TwoWorkers {
 protected:
  size_t wires() const override { return 1; }
  void TearDown() override {
    TwoWorkers::TearDown();
    hosts_.reset();
    for (DevicePointer at : at_) {
      if (at != 0) gpu_.fake().free(at);
    }
    gpu_.fake().run_all();
    gpu_.expect_clean();
  }
  void start(size_t host, SettingValues settings) {
    settings.emplace_back("tcp.slice_kib", "8");
    settings.emplace_back("tcp.buffer_kib", "64");
    settings.emplace_back("tcp.stall_ms", "500");
    settings.emplace_back("staging.ring_mib", "16");
    if (at_[host] == 0) at_[host] = gpu_.fake().allocate(kBytes, static_cast<int>(host));
    start_on(host, "0.0.0.0", std::move(settings), gpudirect::pointer_of<void>(at_[host]), kBytes);
  }
  void give(size_t host) {
    regions_[host] =
        *workers_[host]->register_memory(gpudirect::pointer_of<void>(at_[host]), kBytes);
  }
  TransferId submit(Op op) {
    TransferRequest request = of(op, kBytes);
    if (op == Op::kWrite) request.counter = workers_[1]->remote_counter(counter_);
    posted_before_ = workers_[0]->stats().slices_posted;
    return TwoWorkers::submit(request);
  }
  void fill(size_t host, char letter) { gpu_.fake().write(at_[host], std::string(kBytes, letter)); }
  void expect(size_t host, char letter) {
    EXPECT_TRUE(gpu_.fake().read(at_[host], kBytes) == std::string(kBytes, letter)) << letter;
  }
  uint64_t counted() { return workers_[1]->counter_value(counter_); }
  void both(const WireFaults& faults) {
    hosts_->change([&](Hosts& it) { it.wire(0).faults(0) = it.wire(0).faults(1) = faults; });
  }
  void one(size_t sender, const WireFaults& faults) {
    hosts_->change([&](Hosts& it) { it.wire(0).faults(sender) = faults; });
  }
  void change(const std::function<void(Wire&)>& what) {
    hosts_->change([&](Hosts& it) { what(it.wire(0)); });
  }
  // No byte moves any more, neither at what is submitted next.
  void expect_still() {
    fill(0, 'x');
    fill(1, 'y');
    std::this_thread::sleep_for(milliseconds(20));
    gpu_.fake().run_all();
    expect(0, 'x');
    expect(1, 'y');
  }
  // Something of what was submitted last is on its way.
  void until_posted() {
    until([&] { return workers_[0]->stats().slices_posted > posted_before_ + 1; });
  }

  gpudirect::InstalledFake gpu_{{.devices = 2}};
  std::array<DevicePointer, 2> at_{};
  uint64_t posted_before_ = 0;  // what was submitted last
};

// What was submitted has not ended when the next thing happens.
const WireFaults kSlow = {.bytes_per_s = 1'000'000};
const SettingValues kSurvives = {
    {"peer.answer_ms", "600000"}, {"peer.redial_ms", "100000"}, {"tcp.handshake_ms", "1500"}};
const SettingValues kGivesUp = {
    {"peer.answer_ms", "1000"}, {"peer.redial_ms", "1000"}, {"tcp.handshake_ms", "500"}};

// In one direction or both, for a moment or until the connection is called again. BATON_SEED=n is
// another schedule, BATON_ROUNDS=n a longer one.
TEST_F(DeviceNetwork, WhateverIsCutAWriteLandsOnceAndAReadIsWhole) {
  for (size_t host : {0, 1}) start(host, kSurvives);
  connect();
  std::mt19937_64 random(number_of("BATON_SEED", 0));
  const auto rounds = static_cast<int>(number_of("BATON_ROUNDS", 6));
  uint64_t writes = 0;
  for (int round = 0; round < rounds; ++round) {
    const Op op = round % 3 == 2 ? Op::kRead : Op::kWrite;
    const char letter = static_cast<char>('b' + round % 20);
    const int kind = round % 6;
    SCOPED_TRACE(testing::Message() << "round " << round);
    fill(op == Op::kWrite ? 0 : 1, letter);
    fill(op == Op::kWrite ? 1 : 0, '-');
    both(kSlow);
    const TransferId id = submit(op);
    until_posted();
    std::this_thread::sleep_for(milliseconds(random() % 300));
    if (kind == 0) both({.cut = true});
    if (kind == 1) one(0, {.cut = true});
    if (kind == 2) one(1, {.cut = true});
    if (kind == 3) change([](Wire& wire) { wire.forget_connections(true); });
    if (kind == 4) change([](Wire& wire) { wire.forget_connections(false); });
    if (kind == 5) both({.loss = 0.3});
    std::this_thread::sleep_for(milliseconds(random() % 3 == 0 ? 700 : 100));
    both({});
    EXPECT_EQ(wait(id), absl::OkStatus());
    writes += op == Op::kWrite ? 1 : 0;
    until([&] { return counted() >= writes; });
    EXPECT_EQ(counted(), writes);
    expect(0, letter);
    expect(1, letter);
  }
}

// Its words are lost on the way: of room, of landings, of bytes that were read.
TEST_F(DeviceNetwork, APeerLostBeforeItsConfirmationFailsTheTransfer) {
  start(0, kGivesUp);
  for (const bool in_the_middle : {false, true}) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      start(1, kGivesUp);
      connect();
      if (in_the_middle) both(kSlow);
      const TransferId id = submit(op);
      if (in_the_middle) until_posted();
      one(1, {.cut = true});
      end(1);
      both({});
      const absl::Status status = wait(id);
      EXPECT_TRUE(absl::IsUnavailable(status) || (status.ok() && !in_the_middle)) << status;
      expect_still();
    }
  }
}

TEST_F(DeviceNetwork, InAPartitionItEndsAndNothingMovesAfterwards) {
  for (size_t host : {0, 1}) start(host, kSurvives);
  connect();
  enum class What : uint8_t { kCancel, kDeregister, kDisconnect };
  for (const What what : {What::kCancel, What::kDeregister, What::kDisconnect}) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      SCOPED_TRACE(testing::Message()
                   << "what " << static_cast<int>(what) << " op " << static_cast<int>(op));
      fill(0, op == Op::kWrite ? 'n' : '-');
      fill(1, op == Op::kWrite ? '-' : 'n');
      both(kSlow);
      const TransferId id = submit(op);
      until_posted();
      both({.cut = true});
      absl::Status said;
      if (what == What::kCancel) workers_[0]->cancel(id).IgnoreError();
      if (what == What::kDeregister) {
        hosts_->on(1, [&] { said = workers_[1]->deregister_memory(regions_[1]); });
        EXPECT_TRUE(said.ok()) << said;
        fill(1, 'y');
      }
      if (what == What::kDisconnect) {
        hosts_->on(0, [&] { said = workers_[0]->disconnect(peer_, milliseconds(100)); });
        EXPECT_TRUE(absl::IsDeadlineExceeded(said)) << said;
      }
      both({});
      const absl::Status status = wait(id);
      if (what == What::kDeregister) {
        expect(1, 'y');
        // What was read before may have been on its way, whole.
        if (status.ok() && op == Op::kRead) expect(0, 'n');
        EXPECT_TRUE(absl::IsNotFound(status) || (status.ok() && op == Op::kRead)) << status;
        hosts_->on(1, [&] { give(1); });
      } else {
        EXPECT_FALSE(status.ok());
      }
      if (what == What::kDisconnect) connect();
      remote_ = *workers_[1]->remote_region(regions_[1]);
      expect_still();
      EXPECT_TRUE(wait(submit(Op::kWrite)).ok());
      expect(1, 'x');
    }
  }
}

}  // namespace
}  // namespace baton
