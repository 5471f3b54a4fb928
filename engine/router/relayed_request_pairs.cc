// A request's way through pairs: which prefill worker hands its KV over to the decode worker that
// was picked, and how; what becomes of it when prefill does not.
#include <utility>

#include "engine/http/request_check.h"
#include "engine/router/relayed_request.h"

namespace baton::engine::router {
namespace {

// Tokens of a prompt, where they are known: as --min-remote-tokens is by default.
constexpr size_t kWorthTheWay = 32;

}  // namespace

// A short prompt, or one that decode must compute, is not worth the way; and what is behind a
// prompt prefill workers are not told.
bool RelayedRequest::may_use_params(const Leg& leg) const {
  if (leg.computed_alone || leg.relay->tokens_seen() > 0) return false;
  if (request_->sampling.prompt_logprobs) return false;
  return leg.key->tokens == 0 || leg.key->tokens >= kWorthTheWay;
}

Way RelayedRequest::pick_prefill(const Leg& leg, Attempt& attempt) {
  WorkerGroup& prefill = workers_.prefill;
  const bool by_params = may_use_params(leg);
  std::vector<size_t> avoid;
  const size_t to = *attempt.decode;
  const auto way = [&](size_t from) {
    const Way its = workers_.way(from, to);
    return its == Way::kParams && !by_params ? Way::kNone : its;
  };
  for (size_t i = 0; i < prefill.size(); ++i) {
    if (way(i) == Way::kNone) avoid.push_back(i);
  }
  const std::string& model = workers_.decode[to].model;
  if (!prefill.has_other(avoid, model)) return Way::kNone;
  attempt.prefill = Place(prefill, prefill.pick(*leg.key, avoid, model));
  return way(*attempt.prefill);
}

// The address of the connector that decode asks; "": none.
std::string RelayedRequest::address_of(const Attempt& attempt) const {
  return attempt.prefill.has_value() ? attempt.prefill->address : "";
}

void RelayedRequest::ask_prefill(Leg& leg, Attempt& attempt) {
  const size_t worker = *attempt.prefill;
  const KvAgent& agent = attempt.prefill->agent;
  const bool at_once = agent.known();
  const std::string transfer = at_once ? http::make_request_id() : "";
  attempt.ask =
      PrefillAsk::start(workers_, worker, exchange_->request().path,
                        leg.relay->body_at_prefill(params_at_prefill(transfer)), headers(),
                        [this, &leg, &attempt](const absl::StatusOr<std::string>& params) {
                          prefill_answered(leg, attempt, params);
                        });
  if (!at_once) return;
  ++workers_.handed_over;
  post(leg, attempt, leg.relay->body_behind_prefill(params_behind(agent, transfer)));
}

void RelayedRequest::prefill_answered(Leg& leg, Attempt& attempt,
                                      const absl::StatusOr<std::string>& params) {
  if (self_ == nullptr || attempt.answered) return;
  if (!params.ok()) return compute_alone(leg, attempt);
  if (attempt.fetch != nullptr) return;  // decode knows already
  ++workers_.handed_over;
  post(leg, attempt, leg.relay->body_behind_prefill(*params));
}

// Nothing comes from prefill, and decode, which may be waiting for it, has to hear of that.
void RelayedRequest::compute_alone(Leg& leg, Attempt& attempt) {
  const std::shared_ptr<RelayedRequest> self = self_;
  ++workers_.not_handed_over;
  attempt.prefill.release();
  attempt.status = 0;
  attempt.error_body.clear();
  leg.relay->begin();
  post(leg, attempt, leg.relay->next_body(""));
  attempt.ask.reset();
}

void RelayedRequest::leave_prefill(size_t worker) {
  const std::shared_ptr<RelayedRequest> self = self_;
  for (Leg& leg : legs_) {
    if (self_ == nullptr) return;  // closed meanwhile
    Attempt* const attempt = leg.attempt.get();
    if (attempt == nullptr || attempt->ask == nullptr || attempt->answered) continue;
    if (attempt->prefill.has_value() && *attempt->prefill == worker) compute_alone(leg, *attempt);
  }
}

}  // namespace baton::engine::router
