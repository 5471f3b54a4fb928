// Reads the settings.
#include "verbs/tuning.h"

#include "absl/strings/str_split.h"
#include "transport/settings.h"

namespace baton::verbs {
Time Tuning::detection() const {
  const int64_t once = timeout == 0 ? int64_t{1} << 42 : int64_t{4096} << timeout;
  return Time(once * (retry_count + 1));
}

absl::StatusOr<Tuning> read_tuning(const ProviderContext& context) {
  Tuning tuning;
  std::string devices;
  SettingsReader read(context);
  read.text("verbs.devices", devices);
  if (!devices.empty()) tuning.devices = absl::StrSplit(devices, ',');
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
