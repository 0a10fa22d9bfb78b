from spantrain.planner.groups import group_devices
from spantrain.planner.strategies.spantrain_dp.search import domain_layouts, domain_orders


def test_every_order_of_every_subset_up_to_five_groups(preset_profile):
    profile = preset_profile("laptop")
    orders = domain_orders(group_devices(profile), profile)
    assert len(orders) == len(set(orders)) == 3 + 6 + 6


def test_more_than_five_groups_take_chains(make_cluster, make_graph, make_profile):
    cluster = make_cluster({f"s{k}": {f"d{k}": 1.0} for k in range(7)})
    profile = make_profile(cluster, make_graph(2))
    groups = group_devices(profile)
    assert len(groups) == 7
    orders = domain_orders(groups, profile)
    assert len(orders) <= 2 * 7 * 7
    assert {len(order) for order in orders} == set(range(1, 8))


def test_two_unlike_devices_have_all_five_layouts(preset_profile):
    profile = preset_profile("laptop")
    home = next(group for group in group_devices(profile) if group.name == "home")
    assert set(domain_layouts(home, profile)) == {
        (("home-tx2", "home-nano"),),
        (("home-tx2",), ("home-nano",)),
        (("home-nano",), ("home-tx2",)),
        (("home-tx2",),),
        (("home-nano",),),
    }


def test_twins_are_not_told_apart(preset_profile):
    profile = preset_profile("laptop")
    lab = next(group for group in group_devices(profile) if group.name == "lab")
    assert len(domain_layouts(lab, profile)) == 3


def test_many_devices_have_stages_by_second_level_group_and_unequal_replicas(preset_profile):
    profile = preset_profile("asteroid-c-100")
    (group,) = group_devices(profile)
    layouts = domain_layouts(group, profile)
    assert (group.devices,) in layouts or any(len(layout) == 1 and len(layout[0]) == 6 for layout in layouts)
    assert tuple(part.devices for part in group.subgroups) in layouts
    assert any(len(layout) == 6 for layout in layouts)
    assert all(len({d for slot in layout for d in slot}) == sum(map(len, layout)) for layout in layouts)
