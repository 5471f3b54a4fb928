// A prefill and a decode connector in one process, over a real provider, for tests.
#pragma once

#include "kvtransfer/baton_connector.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/test.h"
#include "tests/until.h"
#include "tests/usable_provider.h"

namespace baton::kvtransfer {

inline const Time kLongEnough = until_gives_up();

inline std::string text(const absl::Status& status) { return std::string(status.message()); }

inline ClusterKey test_key() { return *ClusterKey::from_bytes("a key for this test only"); }

// Providers that two workers of a machine can meet on; some may lack their device on this one.
inline std::vector<std::string> real_providers() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registered_providers()) names.push_back(name);
  return names;
}

inline BatonConnectorOptions options_for(const std::string& provider, const std::string& name) {
  BatonConnectorOptions options;
  options.worker.name = name;
  options.worker.key = test_key();
  options.worker.providers = {provider};
  options.worker.require = provider;
  options.huge_pages = false;
  return options;
}

inline std::unique_ptr<KvConnector> make_or_fail(const BatonConnectorOptions& options) {
  return must(make_baton_connector(options));
}

struct KvPairOptions {
  std::string provider;
  KvSendMode mode = KvSendMode::kLayerwise;
  std::string shape;  // of the prefill worker's link
  Timeline* timeline = nullptr;
  uint32_t max_transfers = 4096;
  bool allow_pull = false;
  Time max_lease = kLongEnough;
  const Clock* clock = nullptr;  // default: Clock::steady()
  KvLayout prefill_layout = test_layout(60);
  KvLayout decode_layout = test_layout(80);
};

struct KvPair {
  explicit KvPair(const KvPairOptions& options) {
    BatonConnectorOptions p = options_for(options.provider, "prefill-0");
    BatonConnectorOptions d = options_for(options.provider, "decode-0");
    p.mode = options.mode;
    p.allow_pull = options.allow_pull;
    p.max_lease = options.max_lease;
    p.worker.timeline = d.worker.timeline = options.timeline;
    p.worker.clock = d.worker.clock = options.clock;
    p.worker.max_transfers = d.worker.max_transfers = options.max_transfers;
    if (!options.shape.empty()) p.worker.shape = *LinkShape::parse(options.shape);
    prefill_connector = make_or_fail(p);
    decode_connector = make_or_fail(d);
    prefill.emplace(*prefill_connector, options.prefill_layout, 1);
    decode.emplace(*decode_connector, options.decode_layout, 2);
  }

  std::string address() const { return prefill_connector->address(); }

  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    step();
    baton::until(
        fact, [this] { step(); }, [this] { return state(); }, from);
  }
  void step() {
    if (prefill) prefill->step();
    if (decode) decode->step();
  }
  void run_to_end(CallSite from = CallSite::here()) {
    until([this] { return decode->open() == 0 && prefill->open_jobs() == 0; }, from);
  }
  std::string state() const {
    return (prefill ? absl::StrCat("prefill has ", prefill->open_jobs(), " open jobs; ") : "") +
           (decode ? absl::StrCat("decode has ", decode->open(), " open loads") : "");
  }

  std::unique_ptr<KvConnector> prefill_connector;
  std::unique_ptr<KvConnector> decode_connector;
  std::optional<TestPrefill> prefill;
  std::optional<TestDecode> decode;
};

}  // namespace baton::kvtransfer
