// Two hosts whose network runs by itself, for tests that hold both sides in one process.
#pragma once

#include "tests/std.h"
#include "tests/two_hosts/hosts.h"

namespace baton {

class MovingHosts {
 public:
  explicit MovingHosts(std::unique_ptr<Hosts> hosts)
      : hosts_(std::move(hosts)), thread_([this] { move(); }) {}
  ~MovingHosts() {
    over_ = true;
    thread_.join();
  }

  // Whatever opens a socket must be called there.
  void on(size_t host, const std::function<void()>& what) const {
    std::thread([&] {
      hosts_->enter(host);
      what();
    }).join();
  }
  // Something happens to the network.
  void change(const std::function<void(Hosts&)>& what) {
    const std::lock_guard lock(mutex_);
    what(*hosts_);
  }

 private:
  void move() {
    while (!over_) {
      {
        const std::lock_guard lock(mutex_);
        hosts_->move(std::chrono::milliseconds(1));
      }
      std::this_thread::yield();  // whoever waits for the lock may have it
    }
  }

  const std::unique_ptr<Hosts> hosts_;
  std::mutex mutex_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace baton
