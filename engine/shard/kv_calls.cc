// Calls and reports as bytes.
#include "engine/shard/kv_calls.h"

#include "engine/shard/wire_lists.h"

namespace baton::engine::shard {
namespace {

constexpr size_t kMaxText = UINT16_MAX;

void put_load(std::string& out, const kvtransfer::KvLoad& load) {
  base::put_text(out, load.prefill);
  base::put_number(out, static_cast<uint16_t>(load.shards.size()));
  for (const std::string& shard : load.shards) base::put_text(out, shard);
  base::put_text(out, load.key);
  base::put_number(out, load.loads_of_key);
  put_list(out, load.tokens);
  base::put_number(out, load.first_token);
  put_list(out, load.blocks);
  put_time(out, load.timeout);
  put_time(out, load.silence);
}

kvtransfer::KvLoad take_load(base::WireReader& reader) {
  kvtransfer::KvLoad load;
  load.prefill = reader.text(kMaxText);
  const auto shards = reader.number<uint16_t>();
  for (uint16_t i = 0; i < shards && !reader.failed(); ++i) {
    load.shards.emplace_back(reader.text(kMaxText));
  }
  load.key = reader.text(kMaxText);
  load.loads_of_key = reader.number<uint32_t>();
  load.tokens = take_list<int32_t>(reader);
  load.first_token = reader.number<uint32_t>();
  load.blocks = take_list<uint32_t>(reader);
  load.timeout = take_time(reader);
  load.silence = take_time(reader);
  return load;
}

}  // namespace

void KvCall::encode(std::string& out) const {
  base::put_number(out, static_cast<uint8_t>(kind));
  base::put_number(out, id);
  switch (kind) {
    case KvCallKind::kStartLoad:
      return put_load(out, load);
    case KvCallKind::kEndLoad:
      return;
    case KvCallKind::kOpenJob:
      base::put_text(out, binding.key);
      base::put_number(out, binding.tokens);
      return base::put_number(out, binding.loads);
    case KvCallKind::kRenewJob:
      return put_time(out, binding.lease);
    case KvCallKind::kSave:
      base::put_number(out, first_layer);
      base::put_number(out, layers);
      base::put_number(out, first_block);
      return put_list(out, blocks);
    case KvCallKind::kFinishJob:
      return put_status(out, outcome);
  }
}

KvCall KvCall::decode(base::WireReader& reader) {
  KvCall call;
  call.kind = static_cast<KvCallKind>(reader.number<uint8_t>());
  call.id = reader.number<uint64_t>();
  switch (call.kind) {
    case KvCallKind::kStartLoad:
      call.load = take_load(reader);
      call.load.id = call.id;
      return call;
    case KvCallKind::kEndLoad:
      return call;
    case KvCallKind::kOpenJob:
      call.binding.key = reader.text(kMaxText);
      call.binding.tokens = reader.number<uint32_t>();
      call.binding.loads = reader.number<uint32_t>();
      return call;
    case KvCallKind::kRenewJob:
      call.binding.lease = take_time(reader);
      return call;
    case KvCallKind::kSave:
      call.first_layer = reader.number<uint32_t>();
      call.layers = reader.number<uint32_t>();
      call.first_block = reader.number<uint32_t>();
      call.blocks = take_list<uint32_t>(reader);
      return call;
    case KvCallKind::kFinishJob:
      call.outcome = take_status(reader);
      return call;
  }
  reader.take(SIZE_MAX);  // fails: there is no such call
  return call;
}

std::string KvReport::encode(const kvtransfer::KvConnectorStats& stats,
                             std::deque<KvEvent>& events) {
  return put_report(
      kBytes, {stats.bytes_sent, stats.bytes_loaded, stats.loads_failed, stats.jobs_failed}, events,
      [](std::string& out, const KvEvent& event) { put_status(out, event.why); });
}

absl::StatusOr<KvReport> KvReport::decode(std::string_view bytes) {
  KvReport report;
  kvtransfer::KvConnectorStats& stats = report.stats;
  const bool known = take_report(
      bytes, kBytes,
      {&stats.bytes_sent, &stats.bytes_loaded, &stats.loads_failed, &stats.jobs_failed},
      KvEventKind::kLoaded, KvEventKind::kSaved, &report.events, &report.more,
      [](base::WireReader& reader, KvEvent& event) { event.why = take_status(reader); });
  if (known) return report;
  return absl::InternalError("a rank sent a report that this version does not know");
}

}  // namespace baton::engine::shard
