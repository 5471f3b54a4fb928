// The table of the settings, and how they are read.
#include "verbs/device/tuning.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_split.h"
#include "transport/settings.h"

namespace baton::verbs {
namespace {

constexpr std::array kSettings = {
    Setting::text(
        "verbs.devices", "",
        "devices to use, as in rxe0 or mlx5_0:1,mlx5_1 (-d); default: all with an active port"),
    Setting::number("verbs.qps", "", "1", 1, 64,
                    "queue pairs per pair of ports (-q); each is a rail"),
    Setting::number(
        "verbs.pairs", "", "0", 0, 256,
        "most pairs of ports, set on the connecting side; 0: pair every port of either side"),
    Setting::number("verbs.gid_index", "", "-1", -1, 4095,
                    "GID to use on every port (-x); -1: the best"),
    Setting::number("verbs.mtu", "bytes", "4096", 256, 4096,
                    "path MTU at most (-m); the ports may take less"),
    Setting::number("verbs.send_depth", "", "256", 16, 8192,
                    "most work requests in flight on a queue pair"),
    Setting::number("verbs.receive_depth", "", "128", 16, 8192,
                    "receives posted for each queue pair's peer (-r)"),
    Setting::number(
        "verbs.shared_receives", "", "4096", 0, 1 << 20,
        "most shared receives of a device, added as needed; 0: each queue pair has its own"),
    Setting::number("verbs.inline_bytes", "bytes", "220", 0, 1024,
                    "largest message sent inline (-I); the device may grant less"),
    Setting::number("verbs.slice_kib", "KiB", "1024", 4, 1 << 20,
                    "size of a slice, the share of a transfer that one rail carries"),
    Setting::number("verbs.inflight_kib", "KiB", "4096", 4, 1 << 20,
                    "bytes posted at a time on a queue pair; a cancel waits for these"),
    Setting::number("verbs.timeout", "", "0", 0, 31,
                    "retransmission timeout, 4.096 us * 2^N (-u); 0: 14, or 18 where one side "
                    "has a single port and no other rail could take over"),
    Setting::number("verbs.retry_count", "", "6", 0, 7,
                    "retransmissions before the rail is lost; rdma_rxe treats 7 as unlimited"),
    Setting::number("verbs.rnr_retry", "", "3", 0, 7,
                    "retries when the peer has no receive posted"),
    Setting::number("verbs.rd_atomic", "", "16", 1, 128,
                    "most RDMA reads outstanding at the device (-o)"),
    Setting::number("verbs.traffic_class", "", "0", 0, 255,
                    "traffic class of the global route header (--tclass): DSCP << 2"),
    Setting::number("verbs.service_level", "", "0", 0, 15, "InfiniBand service level (-S)"),
    Setting::number("verbs.relaxed_ordering", "", "1", 0, 1,
                    "1: PCIe may reorder writes, where the adapter offers it"),
    Setting::number("verbs.stall_ms", "ms", "2000", 1, 3'600'000,
                    "time after which a work request counts as hung; at least four times what "
                    "timeout and retry_count allow",
                    true),
    Setting::number("verbs.port_grace_ms", "ms", "5000", 0, 3'600'000,
                    "how long a port that is down may take to come back before its rail is "
                    "lost, unless another rail can take over"),
    Setting::number("verbs.hold_ms", "ms", "1000", 1, 3'600'000,
                    "delay before a lost rail is set up again"),
    Setting::number("verbs.settle_ms", "ms", "2000", 1, 3'600'000,
                    "how long the peer may take to report what a broken rail delivered", true),
    Setting::number("verbs.connect_ms", "ms", "5000", 1, 3'600'000,
                    "time limit for connecting to a peer and its handshake", true),
    Setting::number("verbs.probe_ms", "ms", "1000", 1, 3'600'000,
                    "idle time after which a queue pair checks that its peer is alive"),
};

}  // namespace

absl::Span<const Setting> verbs_settings() { return kSettings; }

Time Tuning::detection() const { return Time((int64_t{4096} << timeout) * (retry_count + 1)); }

Tuning Tuning::for_session(bool redundant) const {
  constexpr uint8_t kWithOthers = 14, kAlone = 18;
  Tuning out = *this;
  if (timeout == 0) out.timeout = redundant ? kWithOthers : kAlone;
  // The adapter's own verdict comes first where it comes at all: an attempt may take it four times
  // as long as it was told (InfiniBand specification, 9.7.6.1.3).
  out.stall = std::max(stall, 4 * out.detection());
  return out;
}

absl::StatusOr<Tuning> read_tuning(const ProviderContext& context) {
  Tuning tuning;
  std::string devices;
  SettingsReader read(context, kSettings);
  read.text("verbs.devices", devices);
  if (!devices.empty()) tuning.devices = absl::StrSplit(devices, ',');
  read.number("verbs.qps", tuning.queue_pairs);
  read.number("verbs.pairs", tuning.pairs);
  read.number("verbs.gid_index", tuning.gid_index);
  read.number("verbs.mtu", tuning.mtu);
  read.number("verbs.send_depth", tuning.send_depth);
  read.number("verbs.receive_depth", tuning.receive_depth);
  read.number("verbs.shared_receives", tuning.shared_receives);
  read.number("verbs.inline_bytes", tuning.inline_bytes);
  read.kib("verbs.slice_kib", tuning.slice_bytes);
  read.kib("verbs.inflight_kib", tuning.inflight_bytes);
  read.number("verbs.timeout", tuning.timeout);
  read.number("verbs.retry_count", tuning.retry_count);
  read.number("verbs.rnr_retry", tuning.rnr_retry);
  read.number("verbs.rd_atomic", tuning.rd_atomic);
  read.number("verbs.traffic_class", tuning.traffic_class);
  read.number("verbs.service_level", tuning.service_level);
  read.number("verbs.relaxed_ordering", tuning.relaxed_ordering);
  read.ms("verbs.stall_ms", tuning.stall);
  read.ms("verbs.port_grace_ms", tuning.port_grace);
  read.ms("verbs.hold_ms", tuning.hold);
  read.ms("verbs.settle_ms", tuning.settle);
  read.ms("verbs.connect_ms", tuning.connect);
  read.ms("verbs.probe_ms", tuning.probe);
  if (absl::Status status = read.finish(); !status.ok()) return status;
  return tuning;
}

}  // namespace baton::verbs
