// The client's inside: what the store is known to have (store_client.cc), bytes to and from it
// (store_client_bytes.cc).
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/store/store_client.h"
#include "kvtransfer/store/store_messages.h"
#include "transport/base/limits/event_fd.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::kvtransfer::store {

class StoreClient final : public tiers::PeerTier {
 public:
  StoreClient(StoreClientOptions options, const tiers::TierShape& shape,
              std::function<void()> changed);
  ~StoreClient() override;
  absl::Status open();

  bool lookup(std::span<const tiers::TierKey> keys) override;
  bool contains(const tiers::TierKey& key) override;
  bool wants(const tiers::TierKey& key) override;
  bool put(const tiers::TierRecord& record) override;
  void flush() override;
  std::optional<Pin> pin(const tiers::TierKey& key) override;
  void read(std::span<Pin* const> pins, uint32_t part, Time timeout, const Done& done) override;
  uint64_t corrupt() const override { return corrupt_; }
  uint64_t silences() const override { return silences_; }
  std::string explain() const override;

 private:
  // kSilent: connected, and owes an answer. Only where it is kUp has the store anything.
  enum class State : uint8_t { kDown, kAsking, kUp, kSilent };

  struct Known {
    uint32_t page = kNotThere;
    Time usable{};  // for new loads, until then
    Time seen{};    // it was there
  };
  // Lookups of one chain, named by its last key.
  struct Chain {
    uint64_t asked = 0;  // the lookup that is not answered yet; 0: none
    Time until{};        // the answer's deadline, or when it is too old
  };
  struct Asked {
    std::vector<tiers::TierKey> keys;
    Time sent{};
  };
  // A place for one record that the store may read.
  struct Slot {
    uint64_t offer = 0;  // 0: free
    tiers::TierKey key;
    Time until{};
  };
  // A place for what is read, and the transfer that fills it. Its pages must stay until that ends.
  struct Buffer {
    std::byte* data = nullptr;
    size_t offset = 0;  // in the region
    std::vector<uint32_t> pages;
    TransferId transfer;
    bool busy = false;
    size_t first = 0, count = 0;  // which of the pins
  };

  void loop();
  void take_events();
  void take_messages();
  void look_at_time();
  void connect_again();
  void went_down(const absl::Status& why);
  void be_silent(const char* what);
  void spoke();
  void ask(std::span<const tiers::TierKey> keys, Chain* chain, Time now);
  void hear(const Found& found);
  void hear(const Taken& taken);
  void forget_old(Time now);

  bool is_free(Buffer& buffer);
  bool post(Buffer& buffer, std::span<Pin* const> pins, uint32_t part, size_t first, Time timeout);
  absl::Status await(Buffer& buffer, Time timeout);
  void check(const Buffer& buffer, std::span<Pin* const> pins, uint32_t part, const Done& done);

  const StoreClientOptions options_;
  const tiers::TierShape shape_;
  const std::function<void()> changed_;
  const Clock& clock_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<MemoryPool> pool_;
  Block reading_, offering_;
  RemoteRegion offered_;
  size_t buffer_bytes_ = 0;
  Buffer buffers_[2];  // the loading thread's own
  std::unique_ptr<ProgressThread> progress_;
  base::EventFd wake_;

  mutable std::mutex mutex_;
  std::condition_variable slot_freed_;
  bool stop_ = false;
  State state_ = State::kDown;
  PeerId peer_;
  bool calling_ = false;  // peer_ is one that we called and that is not down
  Time call_again_{};
  Time first_silence_{};  // when an answer to the first question is overdue
  bool told_down_ = false;
  RemoteRegion region_;
  uint64_t base_ = 0;
  uint64_t next_id_ = 1;
  absl::flat_hash_map<uint64_t, Asked> asked_;
  absl::flat_hash_map<tiers::TierKey, Chain> chains_;
  absl::flat_hash_map<tiers::TierKey, Known> known_;
  std::vector<Slot> slots_;
  std::atomic<uint64_t> corrupt_{0}, silences_{0};
  std::thread thread_;
};

}  // namespace baton::kvtransfer::store
