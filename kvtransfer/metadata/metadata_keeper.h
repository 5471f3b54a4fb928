// Keeps an agent's metadata in a store, and looks there for that of others, on a thread of its own:
// no call of an agent waits for a server. What it could not do it tries again, for as long as it
// lives; state() says how things stand.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "kvtransfer/metadata/metadata_store.h"

namespace baton::kvtransfer {

class MetadataKeeper {
 public:
  struct Events {
    // Bytes were found that were not there before. What it returns is what state() says.
    std::function<absl::Status(std::string_view agent, const std::string& bytes)> found;
    // They were there, and are not any more.
    std::function<void(std::string_view agent)> gone;
  };

  MetadataKeeper(std::unique_ptr<MetadataStore> store, std::chrono::milliseconds lease,
                 Events events);
  // Takes back what was left there; 3 s at most.
  ~MetadataKeeper();

  // From any thread; they return at once. A label is for what is left besides the whole.
  void publish(std::string_view agent, std::string_view label, std::string bytes);
  // Leaves `farewell` in place of the whole, and removes the rest; without a whole, in place of
  // all.
  void withdraw(std::string_view agent, const std::string& farewell);
  // Follows what is there from now on. Asked for again, it is looked at at once.
  void follow(std::string_view agent, std::string_view label);
  void forget(std::string_view agent);
  // Our own: OK when it is published. Another's: OK when it was found and taken. Else why not;
  // NotFound for one that is not followed.
  absl::Status state(std::string_view agent) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Ours {
    std::string agent, bytes;
    bool put = false;     // to be
    bool remove = false;  // to be
    absl::Status status = absl::UnavailableError("it has not reached the store yet");
  };
  struct Theirs {
    std::string agent, seen;
    bool part = false;   // under a label: that it goes says nothing of the agent
    uint64_t asked = 0;  // another number with each follow(): answers to older ones are not for it
    Clock::time_point due{};
    Clock::duration pause{};
    absl::Status status = absl::UnavailableError("the store was not asked yet");
  };

  void run();
  void renew(std::unique_lock<std::mutex>& lock);
  void put_ours(std::unique_lock<std::mutex>& lock);
  void look(std::unique_lock<std::mutex>& lock);
  Theirs* find(const std::string& key, uint64_t asked);
  void take(const std::string& key, uint64_t asked, absl::StatusOr<std::string> answer,
            std::unique_lock<std::mutex>& lock);
  void changed(std::string_view key);
  Clock::time_point next_due() const;

  const std::unique_ptr<MetadataStore> store_;
  const Clock::duration third_;  // of the lease
  const Events events_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::map<std::string, Ours> ours_;      // by key
  std::map<std::string, Theirs> theirs_;  // by key
  Clock::time_point renew_at_;
  uint64_t last_asked_ = 0;
  bool stopping_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace baton::kvtransfer
