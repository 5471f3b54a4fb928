// Reads the settings.
#include "verbs/tuning.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::verbs {
namespace {

class Reader {
 public:
  explicit Reader(const ProviderContext& context) : context_(context) {}

  template <typename T>
  void number(const char* key, T& value, int64_t least, int64_t most) {
    const std::string text(setting(context_, key, ""));
    if (text.empty()) return;
    int64_t parsed = 0;
    if (absl::SimpleAtoi(text, &parsed) && parsed >= least && parsed <= most) {
      value = static_cast<T>(parsed);
    } else if (status_.ok()) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat("setting ", key, "=", text, ": give a number from ", least, " to ", most));
    }
  }
  void kib(const char* key, size_t& bytes, int64_t least, int64_t most) {
    size_t value = bytes >> 10;
    number(key, value, least, most);
    bytes = value << 10;
  }
  void ms(const char* key, Time& time) {
    int64_t value = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
    number(key, value, 1, 3'600'000);
    time = std::chrono::milliseconds(value);
  }
  const absl::Status& status() const { return status_; }

 private:
  const ProviderContext& context_;
  absl::Status status_;
};

}  // namespace

Time Tuning::detection() const {
  const int64_t once = timeout == 0 ? int64_t{1} << 42 : int64_t{4096} << timeout;
  return Time(once * (retry_count + 1));
}

absl::StatusOr<Tuning> read_tuning(const ProviderContext& context) {
  Tuning tuning;
  const std::string devices(setting(context, "verbs.devices", ""));
  if (!devices.empty()) tuning.devices = absl::StrSplit(devices, ',');
  Reader read(context);
  read.number("verbs.qps", tuning.queue_pairs, 1, 64);
  read.number("verbs.gid_index", tuning.gid_index, -1, 4095);
  read.number("verbs.mtu", tuning.mtu, 256, 4096);
  read.number("verbs.send_depth", tuning.send_depth, 16, 8192);
  read.number("verbs.receive_depth", tuning.receive_depth, 16, 8192);
  read.number("verbs.shared_receives", tuning.shared_receives, 0, 1 << 20);
  read.number("verbs.inline_bytes", tuning.inline_bytes, 0, 1024);
  read.kib("verbs.slice_kib", tuning.slice_bytes, 4, 1 << 20);
  read.kib("verbs.inflight_kib", tuning.inflight_bytes, 4, 1 << 20);
  read.number("verbs.timeout", tuning.timeout, 1, 31);
  read.number("verbs.retry_count", tuning.retry_count, 0, 7);
  read.number("verbs.rnr_retry", tuning.rnr_retry, 0, 7);
  read.number("verbs.rd_atomic", tuning.rd_atomic, 1, 128);
  read.number("verbs.traffic_class", tuning.traffic_class, 0, 255);
  read.number("verbs.service_level", tuning.service_level, 0, 15);
  read.number("verbs.relaxed_ordering", tuning.relaxed_ordering, 0, 1);
  read.number("verbs.rdma_cm", tuning.rdma_cm, 0, 1);
  read.ms("verbs.stall_ms", tuning.stall);
  read.ms("verbs.hold_ms", tuning.hold);
  read.ms("verbs.settle_ms", tuning.settle);
  read.ms("verbs.connect_ms", tuning.connect);
  read.ms("verbs.probe_ms", tuning.probe);
  if (!read.status().ok()) return read.status();
  // The adapter's own verdict comes first where it comes at all: an attempt may take it four times
  // as long as it was told (InfiniBand specification, 9.7.6.1.3).
  tuning.stall = std::max(tuning.stall, 4 * tuning.detection());
  return tuning;
}

}  // namespace baton::verbs
