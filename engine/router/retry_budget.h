// Bounds how many requests are sent a second time, to a part of all requests, so that trouble is
// not multiplied. It is for hedges and for failures that a request may bring with it. What a dead
// worker leaves behind is not paid from it: that work is done only once more.
#pragma once

#include <algorithm>

namespace baton::engine::router {

// Works as Finagle's retry budgets: every request earns a part of a retry, a retry costs a whole
// one. A few may be saved up, and are there from the start. Not thread-safe.
class RetryBudget {
 public:
  explicit RetryBudget(double per_request = 0.2, double saved = 10)
      : per_request_(per_request), most_(saved), left_(saved) {}

  void earn() { left_ = std::min(most_, left_ + per_request_); }
  // False where nothing is left to spend.
  bool spend() {
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }

 private:
  const double per_request_;
  const double most_;
  double left_;
};

}  // namespace baton::engine::router
