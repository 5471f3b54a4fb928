// A fake of the rdma_cm calls, beside a FakeVerbs whose devices and addresses it goes by.
//
//   FakeVerbs fake;  FakeCm cm(fake);
//   WorkerOptions{.extra_providers = {verbs::verbs_over(fake.api(), &cm.api())}};
//
// Everybody who opens a channel is on one network. What the kernel would do meanwhile happens in
// tick(), which a test calls in its loop: nothing is ever answered within a call.
//
// Refused, and put in violations(): steps out of order, private data longer than the wire takes, a
// reply before the queue pair's attributes have been asked for, reading a blocking channel,
// destroying an identifier or a channel with events that were not acknowledged, events
// acknowledged twice.
//
// As with rdma_rxe, a device is deaf for ever once a goodbye could not leave it, because its port
// was down when an established identifier was destroyed: no answer reaches it any more.
#pragma once

#include <list>

#include "tests/std.h"
#include "tests/verbs/fake/fake_verbs.h"

namespace baton {

struct FakeCmId;
struct FakeCmChannel;

verbs::CmApi fake_cm_calls();

class FakeCm {
 public:
  explicit FakeCm(FakeVerbs& verbs);  // one at a time in a process
  ~FakeCm();
  FakeCm(const FakeCm&) = delete;
  FakeCm& operator=(const FakeCm&) = delete;

  const verbs::CmApi& api() const { return api_; }
  void tick();

  // --- faults ---
  bool missing = false;     // /dev/infiniband/rdma_cm is not there
  bool silent = false;      // requests are lost
  bool unroutable = false;  // addresses are not found
  bool impostor = false;    // replies carry somebody else's proof
  bool nobody_listens = false;
  int wrong_device = -1;      // routes lead by this device
  uint8_t traffic_class = 0;  // what an administrator has set for all of rdma_cm
  void disconnect_all();
  void remove_device(size_t device);
  // A stranger calls everybody who listens, with this private data and queue pair 77. How often
  // strangers were rejected, and the last reason.
  void call_from_stranger(const std::string& data);
  uint64_t rejected() const { return rejected_; }
  std::string last_rejection() const { return last_rejection_; }

  uint64_t established() const { return established_; }
  bool deaf(size_t device) const { return deaf_[device]; }
  size_t objects() const;
  std::vector<std::string> violations() const;

 private:
  friend struct FakeCmCalls;  // the functions of the table
  void violation(std::string what);
  void push(FakeCmId& id, rdma_cm_event_type type, int status = 0, const std::string& data = "",
            uint32_t queue_pair = 0, FakeCmId* listener = nullptr);
  FakeCmId& make(FakeCmChannel& channel, void* context);
  void bind(FakeCmId& id, size_t device);
  void request(FakeCmId* caller, const std::string& data, uint32_t queue_pair, FakeCmId& listener,
               size_t device);
  int device_of(const sockaddr* address) const;
  void destroy(FakeCmId& id);

  static FakeCm* current_;
  FakeVerbs& verbs_;
  verbs::CmApi api_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<ibv_context>> contexts_;  // its own, of every device
  std::list<std::unique_ptr<FakeCmChannel>> channels_;
  std::list<std::unique_ptr<FakeCmId>> ids_;
  std::vector<bool> deaf_;  // by device
  uint16_t next_port_ = 40000;
  uint32_t next_sequence_ = 1000;
  uint64_t rejected_ = 0;
  uint64_t established_ = 0;
  std::string last_rejection_;
  std::vector<std::string> violations_;
};

}  // namespace baton
