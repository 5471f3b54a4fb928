// A worker on each of two hosts, over tcp alone, with threads that move their bytes: for tests of
// what a worker says of its routes, and of what moves by which wire.
#pragma once

#include "tests/test.h"
#include "tests/two_hosts/hosts.h"
#include "tests/until.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton {

class TwoWorkers : public testing::Test {
 protected:
  static constexpr size_t kPage = 64 << 10;
  static constexpr size_t kPages = 64;
  static constexpr size_t kAll = kPage * kPages;
  const Time patience_ = until_gives_up();

  virtual size_t wires() const { return 2; }
  void SetUp() override {
    auto hosts = Hosts::create(wires(), 0);
    if (absl::IsUnavailable(hosts.status())) GTEST_SKIP() << hosts.status().message();
    hosts_.emplace(must(std::move(hosts)));
  }
  void TearDown() override {
    for (size_t host : {0, 1}) end(host);
  }
  void end(size_t host) {
    if (!workers_[host]) return;
    threads_[host].reset();
    hosts_->on(host, [&] { workers_[host].reset(); });
  }

  // Host 1 has the memory and the counter that host 0 writes to and raises. `on_1`: what host 1
  // listens on, if that is something else.
  void start(const std::string& listen_host, const SettingValues& settings,
             const std::optional<std::string>& on_1 = std::nullopt) {
    for (size_t host : {0, 1}) {
      memory_[host].assign(kAll, static_cast<char>('a' + host));
      start_on(host, host == 1 ? on_1.value_or(listen_host) : listen_host, settings,
               memory_[host].data(), kAll);
    }
  }
  void start_on(size_t host, const std::string& listen_host, SettingValues settings, void* memory,
                size_t bytes) {
    settings.emplace_back("tcp.slice_kib", "64");  // unless they are given
    settings.emplace_back("tcp.buffer_kib", "128");
    hosts_->on(host, [&] {
      workers_[host] = Worker::create({.name = host == 0 ? "alpha" : "beta",
                                       .providers = {"tcp"},
                                       .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                       .listen_host = listen_host,
                                       .settings = settings})
                           .value();
      threads_[host] = std::make_unique<ProgressThread>(*workers_[host]);
      regions_[host] = workers_[host]->register_memory(memory, bytes).value();
    });
    if (host == 0) return;
    counter_ = *workers_[1]->allocate_counter();
    remote_ = *workers_[1]->remote_region(regions_[1]);
  }
  // Host 0 calls host 1 there, until it has come up or has failed.
  void call(const std::string& where) {
    hosts_->on(0, [&] {
      peer_ = workers_[0]->connect(where).value();
      until([&] { return workers_[0]->peer_state(peer_) != PeerState::kConnecting; });
    });
  }
  void connect(const std::string& where) {
    call(where);
    ASSERT_EQ(workers_[0]->peer_state(peer_), PeerState::kUp)
        << workers_[0]->peer_status(peer_) << "; " << explain();
    std::optional<PeerEvent> up;
    until([&] {
      up = workers_[1]->next_peer_event();
      return up.has_value();
    });
    their_peer_ = up->peer;
  }
  void connect() { connect(workers_[1]->address()); }
  void meet(const SettingValues& settings, const std::string& listen_host = "0.0.0.0") {
    start(listen_host, settings);
    connect();
  }

  template <typename Fact>
  void until(const Fact& fact, CallSite from = CallSite::here()) const {
    baton::until(
        fact, LetOthersRun(), [&] { return state_of(*workers_[0], peer_, "here"); }, from);
  }
  std::string explain() const { return workers_[0]->explain(peer_); }
  bool goes_by(const std::string& address) const {
    const std::string routes = explain();
    const size_t at = routes.find(address);  // behind the bracket are rails that were lost
    return at != std::string::npos && at < routes.find(") [");
  }

  // A write of `bytes`, all of one letter, that raises the counter.
  TransferId write(size_t bytes, char letter) {
    std::fill_n(memory_[0].data(), bytes, letter);
    TransferRequest request = of(Op::kWrite, bytes);
    request.counter = workers_[1]->remote_counter(counter_);
    ++written_;
    return submit(request);
  }
  TransferId read(size_t bytes) { return submit(of(Op::kRead, bytes)); }
  absl::Status wait(TransferId id) {
    absl::Status status;
    hosts_->on(0, [&] { status = workers_[0]->wait(id, patience_); });
    return status;
  }
  // It is done, its bytes are there, and the counter has risen once for each write so far.
  void expect_done(TransferId id, size_t bytes, char letter) {
    const absl::Status status = wait(id);
    ASSERT_TRUE(status.ok()) << status << "; " << explain();
    EXPECT_EQ(std::count_if(memory_[1].begin(), memory_[1].begin() + static_cast<ptrdiff_t>(bytes),
                            [&](char each) { return each == letter; }),
              static_cast<ptrdiff_t>(bytes));
    EXPECT_EQ(workers_[1]->counter_value(counter_), written_);
  }
  // Bytes that have come out of a wire at host 1.
  uint64_t moved_by(size_t wire) {
    uint64_t bytes = 0;
    hosts_->change([&](Hosts& it) { bytes = it.wire(wire).count(0).bytes; });
    return bytes;
  }
  void change(const std::function<void(Hosts&)>& what) { hosts_->change(what); }

  TransferRequest of(Op op, size_t bytes) const {
    TransferRequest request;
    request.op = op;
    request.peer = peer_;
    request.local = regions_[0];
    request.local_layout = Layout::contiguous(0, bytes);
    request.remote = remote_;
    request.remote_layout = Layout::contiguous(0, bytes);
    return request;
  }
  TransferId submit(const TransferRequest& request) { return must(workers_[0]->submit(request)); }

  std::optional<MovingHosts> hosts_;
  std::array<std::vector<char>, 2> memory_;  // outlives the workers
  std::array<std::unique_ptr<Worker>, 2> workers_;
  std::array<std::unique_ptr<ProgressThread>, 2> threads_;
  std::array<MemoryRegion, 2> regions_;
  RemoteRegion remote_;
  CounterId counter_;
  PeerId peer_, their_peer_;  // each the other
  uint64_t written_ = 0;
};

}  // namespace baton
