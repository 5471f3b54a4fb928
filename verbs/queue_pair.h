// One reliable queue pair with its completion queue and message buffers, and the accounting that
// keeps it within its limits: nothing is ever posted that the adapter would have to refuse.
//
//   - Work is added to a chain and handed over with one doorbell by ring(). The last of a chain is
//     signalled, the others are not: their completion follows from a later one.
//   - room() counts what is posted and not yet known to be complete.
//   - When the queue pair breaks, poll() reports the culprit's status and IBV_WC_WR_FLUSH_ERR for
//     everything after it. It is drained() when all that was posted, receives too, has come back.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "verbs/device/device.h"
#include "verbs/device/message.h"

namespace baton::verbs {

// Hears from poll().
class QueuePairOwner {
 public:
  virtual ~QueuePairOwner() = default;
  // Work is done, in the order in which it was added; or not, and then it will never be.
  virtual void sent(uint32_t tag, ibv_wc_status status) = 0;
  // A message came; valid during the call.
  virtual void received(std::string_view message) = 0;
  // A write with an immediate has landed.
  virtual void counted(uint32_t immediate) = 0;
  // The peer sent more than it had credits for.
  virtual void overrun() = 0;
  // The completed bytes may not be visible to the device whose memory they are in: do not count
  // them as arrived.
  virtual void unseen(const absl::Status& why) = 0;
};

class QueuePair {
 public:
  static constexpr int kMaxSges = 16;
  static constexpr uint32_t kNoTag = UINT32_MAX;
  static constexpr uint32_t kMessageSlots = 32;

  // A queue pair that can receive but not send yet.
  static absl::StatusOr<std::unique_ptr<QueuePair>> create(const Port& port, const GidChoice& gid,
                                                           const Tuning& tuning);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // This end, for the peer. Rail, incarnation and so on are the caller's.
  Endpoint local() const;
  // Joins it to the peer's.
  absl::Status connect(const Endpoint& peer);
  // Reads that this end will ask of the peer at a time.
  uint8_t reads_asked(const Endpoint& peer) const;

  // --- sending ---
  struct Work {
    ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
    uint32_t tag = kNoTag;
    uint64_t remote = 0;
    uint32_t rkey = 0;
    uint32_t immediate = 0;
    uint32_t bytes = 0;
    bool host_memory = true;  // the processor may read the local bytes
    bool stays = false;       // and finds them: else it looks before it reads
    int sges = 0;
    ibv_sge sge[kMaxSges];
  };
  // One piece of host or device memory, where nothing is under way.
  struct Alone {
    ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
    uint32_t tag = kNoTag;
    uint64_t remote = 0;
    uint32_t rkey = 0;
    uint32_t immediate = 0;
    bool host_memory = true;
    bool stays = false;
    ibv_sge local{};
  };
  void post_alone(const Alone& work);  // needs idle(), and not broken()
  uint32_t room() const { return depth_ - static_cast<uint32_t>(next_ - first_); }
  size_t inflight_bytes() const { return inflight_bytes_; }
  int max_sges(ibv_wr_opcode opcode) const {
    return opcode == IBV_WR_RDMA_READ ? max_read_sges_ : max_sges_;
  }
  bool message_room() const { return slots_used_ < kMessageSlots && room() > 0; }
  void add(const Work& work);                              // needs room()
  void add_message(std::string_view bytes, uint32_t tag);  // needs message_room()
  void ring();

  // --- completions ---
  bool poll(QueuePairOwner& owner);
  bool idle() const { return first_ == next_; }
  // Messages and immediates received in all.
  uint64_t received() const { return received_; }
  // How many of them the peer may have under way.
  uint32_t window() const { return window_; }
  // `owed` receives have been used and are there again: how many credits to give back for them.
  // With shared receives a busy peer gets more, and an idle pool's worth goes to others.
  uint32_t give_back(uint32_t owed);
  // Asks for a wake-up on the device's channel; false if it had not been asked for before, so that
  // the caller polls once more.
  bool arm();

  // --- breaking ---
  void break_off();  // to the error state, where everything posted flushes
  bool broken() const { return broken_; }
  bool drained() const { return idle() && (pool_ != nullptr ? closed_ : posted_receives_ == 0); }
  // Ends it: afterwards the adapter touches no memory for it. One that has broken, and flushes at
  // once, is destroyed later by the device's reaper; any other here and now. `heir` hears what
  // comes up to the end: a peer may know of it already.
  void destroy(QueuePairOwner* heir = nullptr);

  // Whether its port still has the address that its packets leave from, under the same index.
  bool address_stands() const;
  // The adapter says that this one takes no more of the shared receives.
  void set_last_receive() { last_receive_ = true; }

  bool is(const ibv_qp* queue_pair) const { return queue_pair_ == queue_pair; }
  bool is(const ibv_cq* completions) const { return completions_ == completions; }
  bool shares_receives() const { return pool_ != nullptr; }
  uint32_t number() const { return number_; }
  // Both ends' LID, QPN, PSN and GID once connected, for people and as perftest prints them.
  std::string ends() const;
  uint32_t mtu_bytes() const { return 128u << mtu_; }

 private:
  static constexpr size_t kChain = 16;
  // Some drivers (rdma_rxe) never say that the last receive was used: after so many polls in which
  // nothing came, it was.
  static constexpr uint32_t kQuietPolls = 300;

  struct Record {
    uint32_t tag = kNoTag;
    uint32_t bytes = 0;
    bool message = false;
  };

  QueuePair(const Port& port, const GidChoice& gid, const Tuning& tuning);
  absl::Status make();
  absl::Status modify(ibv_qp_attr& attributes, int mask, const char* to) const;
  std::byte* slot(uint32_t index) const { return memory_ + size_t{index} * kMessageBytes; }
  std::byte* received_at(uint32_t index) const {
    return pool_ != nullptr ? pool_->slot(index) : slot(kMessageSlots + index);
  }
  void post_receives(const uint32_t* slots, size_t count);
  template <typename Posted>
  bool inlined(const Posted& work, absl::Span<const ibv_sge> sges, size_t bytes) const;
  void receive(QueuePairOwner& owner, const ibv_wc& completion);
  Record& record(uint64_t number) { return records_[number & (records_.size() - 1)]; }
  void add_record(ibv_send_wr& request, const Record& record);
  ibv_send_wr& next_request();
  void complete(QueuePairOwner& owner, ibv_wc_status status);
  bool flush(QueuePairOwner* heir);
  void on_sent(QueuePairOwner& owner, const ibv_wc& completion);
  void show_devices(QueuePairOwner& owner, absl::Span<ibv_wc> completions);

  const Port& port_;
  const VerbsApi& api_;
  const GidChoice gid_;
  const Tuning& tuning_;
  ReceivePool* pool_;  // null: it has receives of its own
  uint32_t depth_ = 0;
  uint32_t receives_ = 0;  // of its own
  uint32_t window_ = 0;    // receives that the peer may count on
  uint64_t granted_ = 0;   // credits that the peer has had in all
  uint32_t max_inline_ = 0;
  int max_sges_ = 1;
  int max_read_sges_ = 1;
  uint8_t mtu_ = IBV_MTU_1024;
  uint32_t sequence_ = 0;
  uint32_t number_ = 0;
  std::optional<ibv_gid_entry> source_;  // of its packets, once it is connected
  uint16_t lid_ = 0;                     // of InfiniBand
  Endpoint peer_;                        // as it was connected to

  ibv_cq* completions_ = nullptr;
  ibv_qp* queue_pair_ = nullptr;
  ibv_mr* registration_ = nullptr;
  std::byte* memory_ = nullptr;  // kMessageSlots + receives_ slots
  std::unique_ptr<bool> armed_ =
      std::make_unique<bool>();  // Device::next_completion_event() clears
  bool broken_ = false;
  bool unseen_ = false;  // what completed counts for nothing any more
  bool erred_ = false;   // told to be in the error state
  bool closed_ = false;  // and what came before has been seen; what comes later does not count
  bool last_receive_ = false;
  uint32_t quiet_polls_ = 0;  // since all that was sent has completed

  std::vector<Record> records_;
  uint64_t first_ = 0;   // oldest not known to be complete
  uint64_t next_ = 0;    // number of the next piece of work
  uint64_t handed_ = 0;  // the adapter has taken all before this one
  size_t inflight_bytes_ = 0;
  uint32_t slots_used_ = 0;
  uint32_t next_slot_ = 0;
  size_t chain_ = 0;     // requests not handed over yet
  ibv_send_wr alone_{};  // of post_alone(): what never changes is filled in
  ibv_sge alone_sge_{};
  std::array<ibv_send_wr, kChain> requests_;
  std::array<std::array<ibv_sge, kMaxSges>, kChain> sges_;
  uint32_t posted_receives_ = 0;
  uint64_t received_ = 0;
};

}  // namespace baton::verbs
