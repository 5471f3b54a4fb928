// The table of the settings, and how they are read.
#include "verbs/device/tuning.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_split.h"
#include "transport/settings.h"

namespace baton::verbs {
namespace {

constexpr std::array kSettings = {
    Setting{
        .name = "verbs.devices",
        .kind = Setting::Kind::kText,
        .meaning =
            "devices to use, as in rxe0 or mlx5_0:1,mlx5_1 (-d); default: all with an active port"},
    Setting{.name = "verbs.qps",
            .standard = "1",
            .least = 1,
            .most = 64,
            .meaning = "queue pairs per pair of ports (-q); each is a rail"},
    Setting{
        .name = "verbs.pairs",
        .standard = "0",
        .least = 0,
        .most = 256,
        .meaning =
            "most pairs of ports, set on the connecting side; 0: pair every port of either side"},
    Setting{.name = "verbs.gid_index",
            .standard = "-1",
            .least = -1,
            .most = 4095,
            .meaning = "GID to use on every port (-x); -1: the best"},
    Setting{.name = "verbs.mtu",
            .unit = "bytes",
            .standard = "4096",
            .least = 256,
            .most = 4096,
            .meaning = "path MTU at most (-m); the ports may take less"},
    Setting{.name = "verbs.send_depth",
            .standard = "256",
            .least = 16,
            .most = 8192,
            .meaning = "most work requests in flight on a queue pair"},
    Setting{.name = "verbs.receive_depth",
            .standard = "128",
            .least = 16,
            .most = 8192,
            .meaning = "receives posted for each queue pair's peer (-r)"},
    Setting{
        .name = "verbs.shared_receives",
        .standard = "4096",
        .least = 0,
        .most = 1 << 20,
        .meaning =
            "most shared receives of a device, added as needed; 0: each queue pair has its own"},
    Setting{.name = "verbs.inline_bytes",
            .unit = "bytes",
            .standard = "220",
            .least = 0,
            .most = 1024,
            .meaning = "largest message sent inline (-I); the device may grant less"},
    Setting{.name = "verbs.slice_kib",
            .unit = "KiB",
            .standard = "1024",
            .least = 4,
            .most = 1 << 20,
            .meaning = "size of a slice, the share of a transfer that one rail carries"},
    Setting{.name = "verbs.inflight_kib",
            .unit = "KiB",
            .standard = "4096",
            .least = 4,
            .most = 1 << 20,
            .meaning = "bytes posted at a time on a queue pair; a cancel waits for these"},
    Setting{.name = "verbs.timeout",
            .standard = "0",
            .least = 0,
            .most = 31,
            .meaning = "retransmission timeout, 4.096 us * 2^N (-u); 0: 14, or 18 where one side "
                       "has a single port and no other rail could take over"},
    Setting{.name = "verbs.retry_count",
            .standard = "6",
            .least = 0,
            .most = 7,
            .meaning = "retransmissions before the rail is lost; rdma_rxe treats 7 as unlimited"},
    Setting{.name = "verbs.rnr_retry",
            .standard = "3",
            .least = 0,
            .most = 7,
            .meaning = "retries when the peer has no receive posted"},
    Setting{.name = "verbs.rd_atomic",
            .standard = "16",
            .least = 1,
            .most = 128,
            .meaning = "most RDMA reads outstanding at the device (-o)"},
    Setting{.name = "verbs.traffic_class",
            .standard = "0",
            .least = 0,
            .most = 255,
            .meaning = "traffic class of the global route header (--tclass): DSCP << 2"},
    Setting{.name = "verbs.service_level",
            .standard = "0",
            .least = 0,
            .most = 15,
            .meaning = "InfiniBand service level (-S)"},
    Setting{.name = "verbs.relaxed_ordering",
            .standard = "1",
            .least = 0,
            .most = 1,
            .meaning = "1: PCIe may reorder writes, where the adapter offers it"},
    Setting{.name = "verbs.rdma_cm",
            .standard = "0",
            .least = 0,
            .most = 1,
            .meaning = "1: the connecting side connects queue pairs by librdmacm (-R)"},
    Setting{.name = "verbs.stall_ms",
            .unit = "ms",
            .standard = "2000",
            .least = 1,
            .most = 3'600'000,
            .meaning = "time after which a work request counts as hung; at least four times what "
                       "timeout and retry_count allow",
            .patience = true},
    Setting{.name = "verbs.port_grace_ms",
            .unit = "ms",
            .standard = "5000",
            .least = 0,
            .most = 3'600'000,
            .meaning = "how long a port that is down may take to come back before its rail is "
                       "lost, unless another rail can take over"},
    Setting{.name = "verbs.hold_ms",
            .unit = "ms",
            .standard = "1000",
            .least = 1,
            .most = 3'600'000,
            .meaning = "delay before a lost rail is set up again"},
    Setting{.name = "verbs.settle_ms",
            .unit = "ms",
            .standard = "2000",
            .least = 1,
            .most = 3'600'000,
            .meaning = "how long the peer may take to report what a broken rail delivered",
            .patience = true},
    Setting{.name = "verbs.connect_ms",
            .unit = "ms",
            .standard = "5000",
            .least = 1,
            .most = 3'600'000,
            .meaning = "time limit for connecting to a peer and its handshake",
            .patience = true},
    Setting{.name = "verbs.probe_ms",
            .unit = "ms",
            .standard = "1000",
            .least = 1,
            .most = 3'600'000,
            .meaning = "idle time after which a queue pair checks that its peer is alive"},
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
  read.number("verbs.rdma_cm", tuning.rdma_cm);
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
