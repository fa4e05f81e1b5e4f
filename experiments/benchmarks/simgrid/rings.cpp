// A ring AllGather, or ring attention, in SimGrid's C++ API: an actor for each rank on each ring.
//
// Standard input: ranks, rings, bytes of a block, bandwidth in bytes/s and latency in s of every link, seconds of the
// kernel call on a block, 0 for an AllGather; then each ring's ranks in their order. Standard output: JSON with the
// processor seconds of the platform and of the simulation, and the predicted time. The network is CM02 as in
// tests/support/simgrid/arrivals.py.

#include <ctime>
#include <iostream>
#include <string>
#include <vector>

#include <simgrid/s4u.hpp>

namespace sg4 = simgrid::s4u;

static double seconds_since(std::clock_t began)
{
  return static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
}

static void pass_on(sg4::Mailbox* from, sg4::Mailbox* to, int steps, double block_bytes, double call_s)
{
  static int block = 0; // the content of a block is irrelevant
  for (int step = 0; step < steps; ++step) {
    int* received           = nullptr;
    const sg4::CommPtr got  = from->get_async(&received);
    const sg4::CommPtr sent = to->put_async(&block, static_cast<uint64_t>(block_bytes));
    if (call_s > 0)
      sg4::this_actor::sleep_for(call_s);
    got->wait();
    sent->wait();
  }
  if (call_s > 0)
    sg4::this_actor::sleep_for(call_s);
}

int main(int argc, char** argv)
{
  int ranks = 0, rings = 0;
  double block_bytes = 0, bandwidth_bytes_per_s = 0, latency_s = 0, call_s = 0;
  std::cin >> ranks >> rings >> block_bytes >> bandwidth_bytes_per_s >> latency_s >> call_s;
  std::vector<std::vector<int>> order(rings, std::vector<int>(ranks));
  for (auto& ring : order)
    for (int& rank : ring)
      std::cin >> rank;

  sg4::Engine engine(&argc, argv);
  sg4::Engine::set_config("network/model:CM02");
  sg4::Engine::set_config("network/crosstraffic:0");
  sg4::Engine::set_config("network/TCP-gamma:1e30");
  sg4::Engine::set_config("network/weight-S:0");
  sg4::Engine::set_config("network/bandwidth-factor:1");
  sg4::Engine::set_config("network/latency-factor:1");
  sg4::Engine::set_config("contexts/stack-size:64"); // KiB

  const auto began = std::clock();
  auto* zone       = sg4::create_full_zone("all");
  std::vector<sg4::Host*> hosts;
  for (int rank = 0; rank < ranks; ++rank)
    hosts.push_back(zone->create_host("rank " + std::to_string(rank), 1.0));
  for (int ring = 0; ring < rings; ++ring)
    for (int place = 0; place < ranks; ++place) {
      const int rank = order[ring][place], next = order[ring][(place + 1) % ranks];
      const auto name = std::to_string(rank) + "->" + std::to_string(next);
      const auto* link = zone->create_link(name, bandwidth_bytes_per_s)->set_latency(latency_s)->seal();
      zone->add_route(hosts[rank]->get_netpoint(), hosts[next]->get_netpoint(), nullptr, nullptr,
                      {sg4::LinkInRoute(link)}, false);
    }
  zone->seal();
  for (int ring = 0; ring < rings; ++ring)
    for (int place = 0; place < ranks; ++place) {
      const int rank = order[ring][place], next = order[ring][(place + 1) % ranks];
      auto* from = sg4::Mailbox::by_name(std::to_string(ring) + " " + std::to_string(rank));
      auto* to   = sg4::Mailbox::by_name(std::to_string(ring) + " " + std::to_string(next));
      sg4::Actor::create("hop", hosts[rank], pass_on, from, to, ranks - 1, block_bytes, call_s);
    }
  const double platform_s = seconds_since(began);

  const auto started = std::clock();
  engine.run();
  const double simulated_s = seconds_since(started);
  std::cout.precision(17);
  std::cout << "{\"prepared_s\": " << platform_s << ", \"simulated_s\": " << simulated_s
            << ", \"time_s\": " << sg4::Engine::get_clock() << "}\n";
}
